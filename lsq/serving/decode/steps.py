"""What a search asks of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Words that may follow each of R rows."""

    words: Tensor
    """int64 [R, K], the most probable ones, best first; of equally probable words the lower number
    first."""
    log_probabilities: Tensor
    """float32 [R, K], of these."""
    wanted: Tensor | None
    """float32 [R, W], the log-probabilities of the words that were asked for."""


class Steps(Protocol):
    """A model at work on a batch of sentences, word by word."""

    words: int
    """V, the size of the target vocabulary, special symbols included."""
    longest: int
    """Words that a hypothesis can have at most, its end included."""

    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        """Encode sentences int64 [S] that end with the end of a sentence; forget what was before.

        A language model ignores what the sources say: their number alone counts.

        Args:
            rows: hypotheses of all sentences that will be open at the same time, at most.
            steps: that will be taken, at most.
        """

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        """What may follow when each row goes on by one word.

        Args:
            words: int64 [R], the last word of each row.
            parents: int64 [R], the row of the step before that each row goes on; at the first step,
                its sentence. A row that nobody goes on is forgotten; R may change from step to
                step.
            top: K, how many words are wanted for each row, at most V.
            wanted: int64 [R, W], words whose log-probabilities are wanted in any case.
        """

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        """The same, with the log-probabilities of all words: float32 [R, V]."""
