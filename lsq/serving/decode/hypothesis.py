"""What a search finds."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """One translation of a sentence."""

    words: Tensor
    """int64 [T], the end of the sentence included."""
    score: float
    """Sum of the words' log-probabilities; where scores are normalised, over T to the power of the
    length penalty."""
    word_scores: Tensor
    """float32 [T], the log-probability of each word."""
