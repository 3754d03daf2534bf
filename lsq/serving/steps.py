"""What a search asks of a model, and what it returns. R open hypotheses ("rows"), V words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """Numbers of special words; the defaults are those of fairseq's dictionaries."""

    start: int = 2
    """Precedes the first word of every hypothesis; in fairseq's translation this is the end."""
    padding: int = 1
    """Never chosen."""
    end: int = 2
    unknown: int = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """One translation of a sentence."""

    words: Tensor
    """int64 [T], the end of the sentence included."""
    score: float
    """Sum of the words' log-probabilities; if scores are normalised, over T to the power of the
    length penalty."""
    word_scores: Tensor
    """float32 [T], the log-probability of each word."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Words that may follow each of R rows."""

    words: Tensor
    """int64 [R, K], the most probable first; of equally probable ones the lower number first."""
    log_probabilities: Tensor
    """float32 [R, K]"""
    wanted: Tensor | None
    """float32 [R, W], log-probabilities of the words that were asked for."""


class Steps(Protocol):
    """A model that decodes a batch of sentences word by word."""

    words: int
    """V, the size of the target vocabulary, special symbols included."""
    longest: int
    """Largest number of words of a hypothesis, its end included."""

    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S], each with its end, and forget the batch before.

        A language model ignores the words of the sources; only their number counts.

        Args:
            rows: largest number of hypotheses, of all sentences, that will be open at a time.
            steps: largest number of steps.
        """

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        """Extend each row by one word and return what may follow.

        Args:
            words: int64 [R], the last word of each row.
            parents: int64 [R], the row of the step before that each row extends; at the first
                step, its sentence. Rows without children are forgotten; R may change.
            top: K, how many words to return for each row, at most V.
            wanted: int64 [R, W], words whose log-probabilities are returned in any case.
        """

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """Extend rows as `step` does; return all log-probabilities, float32 [R, V]."""
