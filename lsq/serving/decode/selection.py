"""Which continuations of a sentence's rows are followed.

S sentences, B rows of each (one at the first step), C words that may follow each row, N
continuations that are chosen.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """Continuations of S sentences."""

    scores: Tensor
    """float32 [S, N], sums of log-probabilities from the start on."""
    words: Tensor
    """int64 [S, N]."""
    rows: Tensor
    """int64 [S, N], which of its sentence's rows each goes on, 0 to B - 1."""


class Selection(Protocol):
    """How continuations are chosen."""

    needed: int | None
    """The most probable words of each row that may be chosen, at most; None: all words are needed.
    """

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        """Choose among words int64 [S, B, C] with log-probabilities float32 [S, B, C], -inf for
        none.

        Args:
            totals: float32 [S, B], the scores of the rows; None at the first step.
            sentences: int64 [S], the numbers of the sentences that are still open.
        """


class BeamSelection:
    """The best of all rows together: twice as many as a beam has, since up to half of them may end
    here."""

    def __init__(self, beam: int, vocabulary: int):
        self.needed = 2 * beam
        self.vocabulary = vocabulary

    def choose(
        self, words: Tensor, log_probabilities: Tensor, totals: Tensor | None, sentences: Tensor
    ) -> Chosen:
        return best(words, log_probabilities, totals, self.needed, self.vocabulary)


def best(
    words: Tensor, log_probabilities: Tensor, totals: Tensor | None, count: int, vocabulary: int
) -> Chosen:
    """The `count` continuations with the highest scores, best first; never the whole vocabulary:
    padding is no word."""
    sentences, rows, width = log_probabilities.shape
    scores = log_probabilities if totals is None else log_probabilities + totals[:, :, None]
    count = min(count, rows * vocabulary - 1, rows * width)
    found, places = scores.reshape(sentences, -1).topk(count, dim=1)
    return Chosen(
        scores=found,
        words=words.reshape(sentences, -1).gather(1, places),
        rows=torch.div(places, width, rounding_mode="floor"),
    )
