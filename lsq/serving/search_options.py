"""Options of a search."""

import math
from dataclasses import dataclass, fields

from lsq.config import require_positive

LEAST = {
    "beam": 1,
    "nbest": 1,
    "max_len_a": 0.0,
    "max_len_b": 0,
    "min_len": 0,
    "no_repeat_ngram_size": 0,
    "unk_penalty": 0.0,
}
FINITE = ("length_penalty", "max_len_a", "unk_penalty")
LARGEST_PENALTY = 10
"""Largest magnitude of length_penalty: lengths to a higher power overflow float32."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search; ValueError if a value is out of its range, or two do not go together.

    Most have fairseq-generate's names. Scores count the end of a sentence as a word; limits on
    length do not.
    """

    beam: int = 5
    """Hypotheses that are followed for each sentence."""
    nbest: int = 1
    """Hypotheses that are returned for each sentence, at most `beam`."""
    normalize_scores: bool = True
    """Whether a score is divided by its length to the power of `length_penalty`."""
    length_penalty: float = 1.0
    """Above 1 favours long hypotheses, below 1 short ones (Wu et al. 2016 have another formula;
    this is fairseq's)."""
    max_len_a: float = 0.0
    max_len_b: int = 200
    """A hypothesis has at most max_len_a * S + max_len_b words before its end; S: words of a
    batch's longest source."""
    min_len: int = 1
    """Words of a hypothesis before its end, at least."""
    unk_penalty: float = 0.0
    """Taken from the log-probability of the unknown word."""
    temperature: float = 1.0
    """Logits are divided by this."""
    no_repeat_ngram_size: int = 0
    """No hypothesis has any n-gram of this length twice; 0: no limit."""
    sampling: bool = False
    """Draw words at random in place of a search."""
    sampling_topk: int = -1
    """Draw from so many most probable words alone; -1: from all."""
    sampling_topp: float = -1.0
    """Draw from the fewest words with this sum of probabilities (Holtzman et al. 2020); -1: all."""
    seed: int = 1
    """Seed of what is drawn at random."""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.type is float else field.type
            if type(value) is bool and field.type is not bool or not isinstance(value, kinds):
                raise ValueError(
                    f"{field.name} is {value!r:.100}; it must be of type {field.type.__name__}"
                )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value < least:
                kind = "a whole number of " if type(least) is int else ""
                raise ValueError(f"{name} is {value}; it must be {kind}at least {least}")
        if self.nbest > self.beam:
            raise ValueError(
                f"nbest is {self.nbest} and beam {self.beam}; a search returns at most beam"
                " hypotheses"
            )
        require_positive("temperature", self.temperature)
        for name in FINITE:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a finite number")
        limits = (
            (
                abs(self.length_penalty) <= LARGEST_PENALTY,
                f"length_penalty is {self.length_penalty}; it must be from -{LARGEST_PENALTY} to"
                f" {LARGEST_PENALTY}",
            ),
            (
                -(2**63) <= self.seed < 2**64,
                f"seed is {self.seed}; it must be from -2^63 to 2^64 - 1",
            ),
            (
                self.sampling_topk == -1 or self.sampling_topk >= 1,
                f"sampling_topk is {self.sampling_topk}; it must be at least 1, or -1 for all",
            ),
            (
                self.sampling_topp == -1 or 0 < self.sampling_topp <= 1,
                f"sampling_topp is {self.sampling_topp}; it must be above 0 and at most 1, or -1"
                " for all words",
            ),
            (
                self.sampling or self.sampling_topk == self.sampling_topp == -1,
                "sampling_topk and sampling_topp limit what is drawn; they need sampling",
            ),
            (
                self.sampling_topk == -1 or self.sampling_topp == -1,
                "give sampling_topk or sampling_topp, not both",
            ),
        )
        for holds, message in limits:
            if not holds:
                raise ValueError(message)

    @property
    def all_words(self) -> bool:
        """Whether a search needs the probabilities of all words, not only the highest."""
        return self.sampling and self.sampling_topk == -1 or self.temperature != 1
