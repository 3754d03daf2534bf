"""How weights are pruned: what is measured, and when."""

import math
from dataclasses import dataclass

from lsq.config import require_choice

PATTERNS = ("2:4",)
MEASURES = ("magnitude", "output")


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Which weights count less than others, and at which updates that is decided.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    pattern: str = "2:4"
    """Two of four neighbouring inputs of an output; there is no other one."""
    measure: str = "magnitude"
    """"magnitude": |w|. "output": w² E[x²], the mean square of the change that leaving out a weight makes to its output
    where inputs are independent of each other, measured on a batch. It is the diagonal of the Hessian that SparseGPT
    (Frantar & Alistarh 2023, arXiv:2301.00774) inverts, and orders weights as Wanda (Sun et al. 2023, arXiv:2306.11695)
    does."""
    every: int = 16
    """Updates from one choice of masks to the next; 0: masks stay as they were chosen, and what is pruned gets no
    gradient. Else gradients go straight through to all weights, so that others may come back."""
    decay: float = 2e-4
    """SR-STE (Zhou et al. 2021, arXiv:2102.04010): what is pruned is drawn to zero by this much of itself, added to its
    gradient. 0: plain straight-through gradients. Nothing under every=0."""
    begin: int = 0
    """Updates that are dense, before the first choice."""
    end: int | None = None
    """The number of updates after which all weights count again, from zero where they were pruned; None: never."""

    def __post_init__(self) -> None:
        require_choice("pattern", self.pattern, PATTERNS)
        require_choice("measure", self.measure, MEASURES)
        for name in ("every", "begin"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
        if not (isinstance(self.decay, (int, float)) and math.isfinite(self.decay) and self.decay >= 0):
            raise ValueError(f"decay is {self.decay!r}; it must be a finite number, 0 or more")
        if self.end is not None and (not isinstance(self.end, int) or self.end <= self.begin):
            raise ValueError(f"end is {self.end!r}; it must be a whole number above begin ({self.begin}), or None")

    def sparse(self, updates: int) -> bool:
        """Whether masks count after so many updates."""
        return self.begin <= updates and (self.end is None or updates < self.end)

    def due(self, updates: int) -> bool:
        """Whether masks are chosen after so many updates."""
        since = updates - self.begin
        return self.sparse(updates) and (since == 0 or (self.every > 0 and since % self.every == 0))
