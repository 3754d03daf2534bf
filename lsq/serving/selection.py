"""Which continuations of a sentence's rows a search follows: the best, drawn ones, or the best of
groups that avoid each other's words.

S sentences, B rows of each (one at the first step), C words that may follow each row, N
continuations that are chosen.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lsq.serving.search_options import SearchOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """Continuations of S sentences."""

    scores: Tensor
    """float32 [S, N], sums of log-probabilities from the start on."""
    words: Tensor
    """int64 [S, N]."""
    rows: Tensor
    """int64 [S, N], the row of its sentence that each extends, 0 to B - 1."""


class Selection(Protocol):
    """How continuations are chosen."""

    needed: int | None
    """Number of most probable words of each row that may be chosen; None: all words are needed."""

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """Choose among words int64 [S, B, C] with log-probabilities float32 [S, B, C], -inf where
        a word is forbidden.

        Args:
            totals: float32 [S, B], the scores of the rows; None at the first step.
            sentences: int64 [S], the numbers of the sentences that are still open.
        """


def selection_of(
    options: SearchOptions, beam: int, vocabulary: int, generator: torch.Generator
) -> Selection:
    """Return the selection that the options describe; see `GroupSelection` for what it raises."""
    if options.sampling:
        return SamplingSelection(options, beam, vocabulary, generator)
    if options.diverse_beam_groups != -1:
        return GroupSelection(options, beam, vocabulary)
    return BeamSelection(beam, vocabulary)


def best(
    words: Tensor, log_probabilities: Tensor, totals: Tensor | None, count: int, vocabulary: int
) -> Chosen:
    """Return the `count` continuations with the highest scores, best first; never the whole
    vocabulary, since padding is no word."""
    sentences, rows, width = log_probabilities.shape
    scores = log_probabilities if totals is None else log_probabilities + totals[:, :, None]
    count = min(count, rows * vocabulary - 1, rows * width)
    highest, columns = scores.reshape(sentences, -1).topk(count, dim=1)
    return Chosen(
        scores=highest,
        words=words.reshape(sentences, -1).gather(1, columns),
        rows=torch.div(columns, width, rounding_mode="floor"),
    )


class BeamSelection:
    """Chooses the best of all rows together, twice as many as a beam has: half may end here."""

    def __init__(self, beam: int, vocabulary: int):
        self.needed, self.vocabulary = 2 * beam, vocabulary

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        return best(words, log_probabilities, totals, self.needed, self.vocabulary)


class SamplingSelection:
    """Draws the next word of each row, from all words or from the most probable ones.

    Args:
        options: how many of the most probable (Fan et al. 2018), or up to which sum (Holtzman et
            al. 2020).
        beam: rows of a sentence.
        vocabulary: V.
        generator: source of the random numbers.
    """

    def __init__(
        self, options: SearchOptions, beam: int, vocabulary: int, generator: torch.Generator
    ):
        self.beam, self.generator, self.sum = beam, generator, options.sampling_topp
        self.needed = min(options.sampling_topk, vocabulary) if options.sampling_topk > 0 else None

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        count, rows, _ = words.shape
        words, probabilities = self._limited(words, log_probabilities)
        drawn = self._draw(probabilities.view(count * rows, -1), self.beam // rows)
        drawn = drawn.view(count, rows, -1)
        scores = probabilities.gather(2, drawn).log()
        if totals is not None:
            scores = scores + totals[:, :, None]
        numbers = torch.arange(rows, device=words.device)[:, None].expand_as(drawn)
        scores, words, numbers = (
            each.reshape(count, self.beam) for each in (scores, words.gather(2, drawn), numbers)
        )
        return Chosen(scores=scores, words=words, rows=numbers)

    def _limited(self, words: Tensor, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """The words to draw from and their probabilities, whose sum may be below 1: [S, B, C']
        each."""
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

    def _draw(self, probabilities: Tensor, count: int) -> Tensor:
        """`count` columns of each row of float32 [R, C]; any column, with probability 0, where a
        row is all zeros or NaN."""
        possible = probabilities.sum(1, keepdim=True) > 0
        weights = torch.where(possible, probabilities, 1.0)
        return torch.multinomial(weights, count, replacement=True, generator=self.generator)


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
        return Chosen(
            scores=scores.flatten(1), words=chosen.flatten(1), rows=torch.stack(rows, 2).flatten(1)
        )

    @staticmethod
    def _penalty(words: Tensor, earlier: list[Chosen], weights: Tensor) -> Tensor:
        """Counts of words [S, B', C] among what earlier groups chose, times float32 [S, group]."""
        penalty = torch.zeros(words.shape, dtype=torch.float32, device=words.device)
        for chosen, weight in zip(earlier, weights.T, strict=True):
            for word in chosen.words.T:
                penalty += (words == word[:, None, None]) * weight[:, None, None]
        return penalty
