"""2:4 sparsity: the measure that ranks weights, and the updates that choose masks; docs/numbers.md.

Two of four neighbours in a row are kept. NVIDIA's sparse products read this pattern and skip half
of the work (Mishra et al. 2021, arXiv:2104.08378).
"""

import math
from dataclasses import dataclass

GROUP, KEPT = 4, 2
PATTERNS = ("2:4",)
MEASURES = ("magnitude", "output")
WRITTEN = ("every", "decay", "begin", "end")
"""Fields that may follow the pattern in QuantConfig.sparsity."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """The measure that ranks weights, and the updates at which masks are chosen. Raises ValueError:
    a field has a value that is not allowed."""

    pattern: str = "2:4"
    """Two of four neighbouring inputs of an output, the only pattern."""
    measure: str = "magnitude"
    """"magnitude": |w|. "output": w² E[x²], measured on a batch. That is the mean square of the
    change of the output without the weight, if inputs are independent of each other. It is the
    diagonal of the Hessian that SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774) inverts, and
    orders weights as Wanda (Sun et al. 2023, arXiv:2306.11695) does."""
    every: int = 16
    """Updates from one choice of masks to the next; gradients go straight through, so pruned
    weights may come back. 0: the first masks stay, and pruned weights get no gradient."""
    decay: float = 1.0
    """Decay of pruned weights, relative (SR-STE, Zhou et al. 2021, arXiv:2102.04010). Each update
    draws a pruned weight to zero by this share of itself, times the norm of the weight's gradient
    over that of the weight. 0: plain straight-through gradients. Without effect under every=0."""
    begin: int = 0
    """Dense updates before the first choice."""
    end: int | None = None
    """Updates after which all weights count again, from 0 where they were pruned; None: never."""

    def __post_init__(self) -> None:
        for name, allowed in (("pattern", PATTERNS), ("measure", MEASURES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(repr, allowed))}"
                )
        for name in ("every", "begin"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
        if not (
            isinstance(self.decay, (int, float)) and math.isfinite(self.decay) and self.decay >= 0
        ):
            raise ValueError(f"decay is {self.decay!r}; it must be a finite number, 0 or more")
        if self.end is not None and (not isinstance(self.end, int) or self.end <= self.begin):
            raise ValueError(
                f"end is {self.end!r}; it must be a whole number above begin ({self.begin}), or"
                " None"
            )

    @staticmethod
    def read(text: str) -> "Pruning | None":
        """Parse QuantConfig.sparsity: "2:4", or with fields, "2:4,every=32,end=500"; None for "".
        Raises ValueError: the text has another form."""
        if not isinstance(text, str):
            raise ValueError(f"sparsity is {text!r}; it must be a text, such as '2:4'")
        pattern, *given = [part.strip() for part in text.split(",")]
        if not pattern and not given:
            return None
        found = {}
        for part in given:
            name, equals, value = (one.strip() for one in part.partition("="))
            if not equals or name not in WRITTEN or name in found:
                raise ValueError(
                    f"sparsity is {text!r}, and {part!r} says nothing; behind the pattern may"
                    f" follow, once each: {', '.join(f'{one}=...' for one in WRITTEN)}"
                )
            try:
                found[name] = float(value) if name == "decay" else int(value)
            except ValueError as error:
                raise ValueError(
                    f"sparsity is {text!r}, but {name} must be a number, not {value!r}"
                ) from error
        try:
            return Pruning(pattern=pattern, **found)
        except ValueError as error:
            raise ValueError(f"sparsity is {text!r}: {error}; '' is dense") from error

    def sparse(self, updates: int) -> bool:
        """Return whether masks apply after `updates` updates."""
        return self.begin <= updates and (self.end is None or updates < self.end)

    def due(self, updates: int) -> bool:
        """Return whether masks are chosen anew after `updates` updates."""
        since = updates - self.begin
        return self.sparse(updates) and (since == 0 or (self.every > 0 and since % self.every == 0))


def check_width(name: str, columns: int) -> None:
    """Raise ValueError for a number of columns that is 0 or no multiple of GROUP."""
    if columns % GROUP or not columns:
        larger = max(1, -(-columns // GROUP)) * GROUP
        raise ValueError(
            f"{name} has {columns} inputs, but 2:4 sparsity needs a multiple of {GROUP}; use"
            f" {larger}"
        )
