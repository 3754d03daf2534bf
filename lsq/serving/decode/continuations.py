"""Which words may follow the open rows of a search, with what the options make of their
probabilities.

S sentences, R rows, V words of the vocabulary, C words that may follow a row, T words of a row so
far.
"""

import math

import torch
from torch import Tensor

from lsq.serving.decode.ngrams import repeating
from lsq.serving.decode.options import SearchOptions
from lsq.serving.decode.steps import Steps
from lsq.serving.decode.symbols import Symbols

NOTHING = -math.inf
BANNED_TOGETHER = 8
"""Words that are asked for in place of banned ones come in multiples of this, for few different
numbers of them."""


class Continuations:
    """Asks a model for as many words as the options can leave a use for, and applies the options to
    them.

    The most probable words are enough: where up to f words of a row are forbidden or made less
    probable, its best n are among the n + f best that the model gives. Words that are made more
    probable, or are the only ones allowed, are asked for by name.

    Args:
        steps: the model.
        options: of the search.
        symbols: special words.
        limit: words before the end that a hypothesis has at most.
        needed: n, where the options do not make it look at all words of the vocabulary.
        forced: int64 [S, P], the words that sentences begin with, filled with padding; None: none
            does.
    """

    def __init__(
        self,
        steps: Steps,
        options: SearchOptions,
        symbols: Symbols,
        limit: int,
        needed: int | None,
        forced: Tensor | None,
    ):
        self.steps, self.options, self.symbols, self.limit, self.forced = (
            steps,
            options,
            symbols,
            limit,
            forced,
        )
        self.needed = None if options.all_words else needed
        self.step = 0

    def next(self, history: Tensor, parents: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """What may follow at the next step: (words int64 [R, C], log-probabilities float32 [R, C],
        -inf for none).

        Args:
            history: int64 [R, T + 1], the start and the words of each row.
            parents: int64 [R], as `Steps.step` takes them.
            sentences: int64 [R], the sentence of each row.
        """
        step, self.step = self.step, self.step + 1
        if step == self.limit:
            return self._end_alone(history[:, -1], parents)
        forced, banned, fixed = None, history[:, :0], [self.symbols.padding]
        if self.forced is not None and step < self.forced.shape[1]:
            forced = self.forced[sentences, step]
        # forced words are beyond it; fairseq lets it wait for all sentences' prefixes
        if step < self.options.min_len:
            fixed.append(self.symbols.end)
        if self.options.no_repeat_ngram_size:
            banned = repeating(history[:, 1:], self.options.no_repeat_ngram_size)
        words, found, wanted = self._ask(history[:, -1], parents, forced, banned.shape[1])
        found = self._penalise_unknown(words, found)
        for word in fixed:
            found = found.masked_fill(words == word, NOTHING)
        for column in banned.T:
            found = found.masked_fill(words == column[:, None], NOTHING)
        if forced is not None:
            words, found = self._force(words, found, forced, wanted)
        return words, found

    def forced_to_end(self, sentences: Tensor) -> Tensor | None:
        """Which of the sentences int64 [S] have the end in their prefix at the next step: bool [S];
        None: none."""
        if self.forced is None or self.step >= min(self.limit, self.forced.shape[1]):
            return None
        return self.forced[sentences, self.step] == self.symbols.end

    def _end_alone(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """The end, which alone may follow the longest hypotheses."""
        if self.needed is None:
            words, found = self._all(last, parents)
            return words, found.masked_fill(words != self.symbols.end, NOTHING)
        end = last.new_full((len(last), 1), self.symbols.end)
        return end, self.steps.step(last, parents, top=1, wanted=end).wanted

    def _all(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        found = self.steps.step_all(last, parents)
        if self.options.temperature != 1:
            found = (found / self.options.temperature).log_softmax(1)
        return torch.arange(found.shape[1], device=last.device).expand(len(found), -1), found

    def _ask(
        self, last: Tensor, parents: Tensor, forced: Tensor | None, banned: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(words, log-probabilities, those of `forced` words) before the options count; up to
        `banned` are banned."""
        end, unknown, penalty = self.symbols.end, self.symbols.unknown, self.options.unk_penalty
        if self.needed is None:
            words, found = self._all(last, parents)
            wanted = None if forced is None else found.gather(1, forced[:, None])
            return words, found, wanted
        names = [] if forced is None else [torch.where(forced == self.symbols.padding, end, forced)]
        if penalty < 0:
            names.append(torch.full_like(last, unknown))
        # 3: padding, end, unknown word, whether forbidden now or not, since a model may prepare a
        # step for each number
        top = self.needed + 3 + -(-banned // BANNED_TOGETHER) * BANNED_TOGETHER
        given = self.steps.step(
            last,
            parents,
            top=min(self.steps.words, top),
            wanted=torch.stack(names, 1) if names else None,
        )
        words, found, wanted = given.words, given.log_probabilities, given.wanted
        if penalty < 0:
            words = torch.cat([words, names[-1][:, None]], 1)
            found = torch.cat(
                [found.masked_fill(given.words == unknown, NOTHING), wanted[:, -1:]], 1
            )
        return words, found, wanted

    def _penalise_unknown(self, words: Tensor, found: Tensor) -> Tensor:
        penalty = self.options.unk_penalty
        return (
            torch.where(words == self.symbols.unknown, found - penalty, found) if penalty else found
        )

    def _force(
        self, words: Tensor, found: Tensor, forced: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The forced word alone where a row has one. No option forbids it."""
        word, probability = forced[:, None], wanted[:, :1]
        none = word == self.symbols.padding
        probability = self._penalise_unknown(word, probability).masked_fill(none, NOTHING)
        if self.needed is None:
            return words, torch.where(none, found, torch.where(words == word, probability, NOTHING))
        return torch.cat([words, word], 1), torch.cat(
            [found.masked_fill(~none, NOTHING), probability], 1
        )
