"""Which words may follow the open rows of a search, and which of them it follows: the best, drawn
ones, or the best of groups that avoid each other's words.

S open sentences, B rows of each (one at the first step), R = S * B rows, V words of the vocabulary,
C words that may follow a row, N continuations of a sentence that are chosen, T words of a row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

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
        limit: words before the end that a hypothesis has at most.
        needed: n; None: all words of the vocabulary.
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
        """Return (words int64 [R, C] that may follow at the next step, their log-probabilities
        float32 [R, C], -inf for forbidden ones).

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
        for word in (*fixed, *banned.T[:, :, None]):
            values = values.masked_fill(words == word, FORBIDDEN)
        return (words, values) if forced is None else self._force(words, values, forced, wanted)

    def forced_to_end(self, sentences: Tensor) -> Tensor | None:
        """bool [S]: whether the prefixes of sentences int64 [S] end at the next step; None: no."""
        if self.forced is None or self.step >= min(self.limit, self.forced.shape[1]):
            return None
        return self.forced[sentences, self.step] == self.symbols.end

    def _end_alone(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the end, which alone may follow the longest hypotheses."""
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
        """Return (words, log-probabilities, those of `forced` words) before the options count; up
        to `banned` words will be banned."""
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


class Chosen(NamedTuple):
    """Continuations of S sentences."""

    scores: Tensor
    """float32 [S, N], sums of log-probabilities from the start on."""
    words: Tensor
    """int64 [S, N]."""
    rows: Tensor
    """int64 [S, N], the row of its sentence that each extends, 0 to B - 1."""


class BeamSelection:
    """Chooses the best of all rows together, twice as many as a beam has: half may end here.

    `needed` is the number of most probable words of each row that a selection may choose; None: all
    words are needed.
    """

    def __init__(self, beam: int, vocabulary: int):
        self.needed, self.vocabulary = 2 * beam, vocabulary

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """Choose among words int64 [S, B, C] with log-probabilities float32 [S, B, C], -inf where
        a word is forbidden.

        Args:
            totals: float32 [S, B], the scores of the rows; None at the first step.
            sentences: int64 [S], the numbers of the sentences that are still open.
        """
        return best(words, log_probabilities, totals, self.needed, self.vocabulary)


def best(
    words: Tensor, log_probabilities: Tensor, totals: Tensor | None, count: int, vocabulary: int
) -> Chosen:
    """Return the `count` continuations with the highest scores, best first; never the whole
    vocabulary, since padding is no word."""
    sentences, rows, width = log_probabilities.shape
    scores = log_probabilities if totals is None else log_probabilities + totals[:, :, None]
    count = min(count, rows * vocabulary - 1, rows * width)
    highest, columns = scores.reshape(sentences, -1).topk(count, dim=1)
    chosen = words.reshape(sentences, -1).gather(1, columns)
    return Chosen(highest, chosen, torch.div(columns, width, rounding_mode="floor"))


class SamplingSelection:
    """Draws the next word of each row, from all words, from the most probable ones (Fan et al.
    2018), or from the most probable up to a sum (Holtzman et al. 2020)."""

    def __init__(
        self, options: SearchOptions, beam: int, vocabulary: int, generator: torch.Generator
    ):
        self.beam, self.generator, self.sum = beam, generator, options.sampling_topp
        self.needed = min(options.sampling_topk, vocabulary) if options.sampling_topk > 0 else None

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """See BeamSelection."""
        count, rows, _ = words.shape
        words, probabilities = self._limited(words, log_probabilities)
        # any column, with probability 0, where a row is all zeros or NaN
        possible = probabilities.sum(2, keepdim=True) > 0
        weights = torch.where(possible, probabilities, 1.0).view(count * rows, -1)
        drawn = torch.multinomial(
            weights, self.beam // rows, replacement=True, generator=self.generator
        ).view(count, rows, -1)
        scores = probabilities.gather(2, drawn).log()
        if totals is not None:
            scores = scores + totals[:, :, None]
        numbers = torch.arange(rows, device=words.device)[:, None].expand_as(drawn)
        return Chosen(
            *(each.reshape(count, self.beam) for each in (scores, words.gather(2, drawn), numbers))
        )

    def _limited(self, words: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words to draw from and their probabilities, whose sum may be below 1: [S, B,
        C'] each."""
        if self.needed is not None:
            highest, columns = log_probabilities.topk(min(self.needed, words.shape[2]), dim=2)
            # the end alone is one word; as many random numbers are drawn at every step
            padding = (0, self.needed - highest.shape[2])
            words = functional.pad(words.gather(2, columns), padding)
            return words, functional.pad(highest.exp(), padding)
        probabilities = log_probabilities.exp()
        if self.sum == -1:
            return words, probabilities
        probabilities, columns = probabilities.sort(dim=2, descending=True)
        before = functional.pad(probabilities.cumsum(2)[:, :, :-1], (1, 0), value=-1.0)
        kept = before < self.sum
        most = int(kept.sum(2).max())
        return words.gather(2, columns[:, :, :most]), (probabilities * kept)[:, :, :most]


class GroupSelection:
    """Diverse beam search (Vijayakumar et al. 2018), with penalties that add up over a hypothesis,
    as in fairseq. Groups choose one after another; row b is of group b % G.

    A word costs `diverse_beam_strength` for each time that an earlier group has just chosen it, and
    as much again for each position at which both groups chose the same word before.

    Raises:
        ValueError: the groups do not divide the beam, which a small vocabulary has made smaller.
    """

    def __init__(self, options: SearchOptions, beam: int, vocabulary: int):
        self.groups, self.strength = options.diverse_beam_groups, options.diverse_beam_strength
        self.vocabulary = vocabulary
        if beam % self.groups:
            raise ValueError(
                f"diverse_beam_groups is {self.groups}, but {vocabulary} words allow a beam of"
                f" {beam} at most; give a beam that the groups divide"
            )
        self.size = beam // self.groups
        self.needed = self.size + beam  # up to `beam` words become less probable

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """See BeamSelection."""
        first, device = totals is None, words.device
        if first:
            sizes = len(sentences), self.groups, self.groups
            self.alike = torch.zeros(sizes, dtype=torch.float32, device=device)
        results: list[Chosen] = []
        for group in range(self.groups):
            own = slice(None) if first else slice(group, None, self.groups)
            probabilities = log_probabilities[:, own]
            if group:
                weights = 1 + self.alike[sentences, group, :group]
                penalty = self._penalty(words[:, own], results, weights)
                probabilities = torch.add(probabilities, penalty, alpha=-self.strength)
            of_rows = None if first else totals[:, own]
            results.append(best(words[:, own], probabilities, of_rows, self.size, self.vocabulary))
        chosen = torch.stack([each.words for each in results], 2)  # [S, N, G]
        self.alike[sentences] += (chosen[:, :, :, None] == chosen[:, :, None]).sum(1)
        rows = [
            each.rows if first else each.rows * self.groups + group
            for group, each in enumerate(results)
        ]
        scores = torch.stack([each.scores for each in results], 2)
        return Chosen(scores.flatten(1), chosen.flatten(1), torch.stack(rows, 2).flatten(1))

    @staticmethod
    def _penalty(words: Tensor, earlier: list[Chosen], weights: Tensor) -> Tensor:
        """Count words [S, B', C] among what earlier groups chose, times float32 [S, group]."""
        penalty = torch.zeros(words.shape, dtype=torch.float32, device=words.device)
        for chosen, weight in zip(earlier, weights.T, strict=True):
            for word in chosen.words.T:
                penalty += (words == word[:, None, None]) * weight[:, None, None]
        return penalty
