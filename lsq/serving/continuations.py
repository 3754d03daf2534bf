"""Which words may follow the open rows of a search, with probabilities as the options change them.

S sentences, R rows, V words of the vocabulary, C words that may follow a row, T words of a row so
far.
"""

import math

import torch
from torch import Tensor

from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Steps, Symbols

FORBIDDEN = -math.inf
NO_WORD = -1
"""Fills rows that have fewer banned words than others."""
BANNED_TOGETHER = 8
"""Extra words for banned ones are asked for in multiples of this: few different numbers of them."""


class Continuations:
    """Asks a model for as many words as the options can need, and applies the options to them.

    The most probable words are enough: if up to f words of a row are forbidden or made less
    probable, its best n are among the n + f best that the model gives. Words that are made more
    probable, or are the only ones allowed, are asked for by name.

    Args:
        steps: the model.
        options: of the search.
        symbols: special words.
        limit: words before the end that a hypothesis has at most.
        needed: n, unless the options need all words of the vocabulary.
        forced: int64 [S, P], the words that sentences begin with, filled with padding, or None.
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
        self.steps, self.options, self.symbols, self.limit = steps, options, symbols, limit
        self.forced, self.needed, self.step = forced, None if options.all_words else needed, 0

    def next(self, history: Tensor, parents: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Return what may follow at the next step: (words int64 [R, C], log-probabilities float32
        [R, C], -inf for forbidden ones).

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
        # forced words may be the end; fairseq waits for the prefixes of all sentences instead
        if step < self.options.min_len:
            fixed.append(self.symbols.end)
        if self.options.no_repeat_ngram_size:
            banned = repeating(history[:, 1:], self.options.no_repeat_ngram_size)
        words, values, wanted = self._ask(history[:, -1], parents, forced, banned.shape[1])
        values = self._penalise_unknown(words, values)
        for word in fixed:
            values = values.masked_fill(words == word, FORBIDDEN)
        for column in banned.T:
            values = values.masked_fill(words == column[:, None], FORBIDDEN)
        return (words, values) if forced is None else self._force(words, values, forced, wanted)

    def forced_to_end(self, sentences: Tensor) -> Tensor | None:
        """bool [S]: whether the prefixes of sentences int64 [S] end at the next step; None: no."""
        if self.forced is None or self.step >= min(self.limit, self.forced.shape[1]):
            return None
        return self.forced[sentences, self.step] == self.symbols.end

    def _end_alone(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """The end, which alone may follow the longest hypotheses."""
        if self.needed is None:
            words, values = self._all(last, parents)
            return words, values.masked_fill(words != self.symbols.end, FORBIDDEN)
        end = last.new_full((len(last), 1), self.symbols.end)
        return end, self.steps.step(last, parents, top=1, wanted=end).wanted

    def _all(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        values = self.steps.step_all(last, parents)
        if self.options.temperature != 1:
            values = (values / self.options.temperature).log_softmax(1)
        return torch.arange(values.shape[1], device=last.device).expand(len(values), -1), values

    def _ask(
        self, last: Tensor, parents: Tensor, forced: Tensor | None, banned: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(words, log-probabilities, those of `forced` words) before the options count; up to
        `banned` of them are banned."""
        end, unknown, penalty = self.symbols.end, self.symbols.unknown, self.options.unk_penalty
        if self.needed is None:
            words, values = self._all(last, parents)
            return words, values, None if forced is None else values.gather(1, forced[:, None])
        names = [] if forced is None else [torch.where(forced == self.symbols.padding, end, forced)]
        if penalty < 0:
            names.append(torch.full_like(last, unknown))
        # 3: padding, end and unknown word, forbidden or not, since a model may prepare a step for
        # each number
        top = self.needed + 3 + -(-banned // BANNED_TOGETHER) * BANNED_TOGETHER
        wanted = torch.stack(names, 1) if names else None
        given = self.steps.step(last, parents, top=min(self.steps.words, top), wanted=wanted)
        words, values, wanted = given.words, given.log_probabilities, given.wanted
        if penalty < 0:
            values = values.masked_fill(words == unknown, FORBIDDEN)
            words = torch.cat([words, names[-1][:, None]], 1)
            values = torch.cat([values, wanted[:, -1:]], 1)
        return words, values, wanted

    def _penalise_unknown(self, words: Tensor, values: Tensor) -> Tensor:
        penalty = self.options.unk_penalty
        if not penalty:
            return values
        return torch.where(words == self.symbols.unknown, values - penalty, values)

    def _force(
        self, words: Tensor, values: Tensor, forced: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Allow a row's forced word alone, if it has one. No option forbids it."""
        word = forced[:, None]
        free = word == self.symbols.padding
        value = self._penalise_unknown(word, wanted[:, :1]).masked_fill(free, FORBIDDEN)
        if self.needed is None:
            return words, torch.where(free, values, torch.where(words == word, value, FORBIDDEN))
        values = torch.cat([values.masked_fill(~free, FORBIDDEN), value], 1)
        return torch.cat([words, word], 1), values


def repeating(history: Tensor, size: int) -> Tensor:
    """Return the words that would repeat an n-gram of their row (Paulus et al. 2018, section 2.5).

    Args:
        history: int64 [R, T], the words of each row without its start, which is in no n-gram.
        size: n, at least 1.

    Returns:
        int64 [R, W], filled with NO_WORD; W: the largest number of such words of a row.
    """
    length = history.shape[1]
    if length < size:
        return history.new_empty(len(history), 0)
    last = history[:, length - size + 1 :]  # the n - 1 words that the next one would complete
    before = history[:, :-1].unfold(1, size - 1, 1) if size > 1 else history[:, :, None][:, :, :0]
    repeats = (before == last[:, None]).all(2)
    words = history[:, size - 1 :].masked_fill(~repeats, NO_WORD)
    return words.sort(1, descending=True).values[:, : int(repeats.sum(1).max())]
