"""How gradients travel between workers."""

import math
from dataclasses import dataclass

from lsq.config import require_choice, require_positive
from lsq.ops.gradient_layout import BLOCKS
from lsq.quant import GRADIENT

COMPRESSED = ("gcq", "int8", "int8_hier", "int4_hier")
"""Modes whose codes lsq makes itself."""
MODES = ("auto", *COMPRESSED, "bf16", "fp16")
ROUNDINGS = ("nearest", "stochastic")
GCQ_ADVISED_WORKERS = 16
"""More of them leave gcq fewer than 7 codes on each side of zero: a warning."""
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """How the workers of a training average their gradients.

    Formulas and figures: docs/distributed.md.
    """

    mode: str = "auto"
    """"int8" (two hops, for one GPU a node), "int8_hier" (floats inside a node, int8 between
    nodes), "int4_hier" (the same with 4 bits on the first hop; experimental), "gcq" (LightSeq's
    scheme, for few workers), "bf16" or "fp16" (PyTorch's own hooks), or "auto": bf16 on one node,
    int8_hier on several.
    """
    block: int = 128
    """Neighbouring values that share a scale, a bfloat16: 64 or 32 round more exactly and send 1.5
    or 4.6 % more."""
    rounding: str | None = None
    """"nearest" or "stochastic"; None: stochastic for int4_hier, nearest for the others. "gcq"
    knows nearest alone."""
    error_feedback: bool = False
    """Whether what rounding took from a gradient is added to the next one (Seide et al. 2014).

    It takes 4 bytes a parameter and is meant for SGD with momentum.
    """
    node_size: int | None = None
    """Workers on a node; None: what torchrun started there (LOCAL_WORLD_SIZE), or else those on one
    host."""
    row: int = 1024
    """gcq: neighbouring values that share a clip."""
    quantile: float = 0.99
    """gcq: share of a row's magnitudes that lie within its clip."""
    timeout_s: float = 600.0
    """Seconds after which an exchange that some worker does not take part in fails."""
    seed: int = 0
    """Of stochastic rounding."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("block", self.block, BLOCKS)
        require_choice("rounding", self.rounding, (None, *ROUNDINGS))
        if self.mode == "gcq" and self.rounding == "stochastic":
            raise ValueError(
                "rounding is 'stochastic', but mode gcq rounds to nearest; leave rounding out"
            )
        if self.error_feedback and self.mode in ("bf16", "fp16"):
            raise ValueError(
                f"error_feedback is on, but mode {self.mode} is PyTorch's own and has none; choose"
                " one of "
                f"{', '.join(COMPRESSED)}, or leave error_feedback off"
            )
        if self.rounding is not None and self.mode in ("bf16", "fp16"):
            raise ValueError(
                f"rounding is {self.rounding!r}, but mode {self.mode} is PyTorch's own and rounds"
                " to "
                f"nearest; choose one of {', '.join(COMPRESSED)}, or leave rounding out"
            )
        for name in ("node_size", "row"):
            value = getattr(self, name)
            if not (name == "node_size" and value is None) and not (_whole(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
        if not (isinstance(self.quantile, (int, float)) and 0 < self.quantile <= 1):
            raise ValueError(f"quantile is {self.quantile!r}; it must be above 0 and at most 1")
        require_positive("timeout_s", self.timeout_s)
        if not (_whole(self.seed) and 0 <= self.seed <= LARGEST_SEED):
            raise ValueError(
                f"seed is {self.seed!r}; it must be a whole number from 0 to {LARGEST_SEED}"
            )

    @property
    def stochastic(self) -> bool:
        """Whether codes are rounded at random."""
        return (
            self.rounding or ("stochastic" if self.mode == "int4_hier" else "nearest")
        ) == "stochastic"


def kept_largest(values: int, quantile: float) -> int:
    """gcq: which magnitude of a row of so many values is its clip, counted from the largest, 1."""
    # 100 * (1 - 0.99) is a little more than 1
    return max(1, math.ceil(round(values * (1 - quantile), 6)))


def gcq_levels(workers: int) -> int:
    """Largest code that each of `workers` may send under gcq, so that their int8 sum cannot
    overflow.

    Raises:
        ValueError: none is left but 0.
    """
    levels = GRADIENT.largest // workers
    if levels == 0:
        raise ValueError(
            f"mode gcq sums codes in int8, so that each of {workers} workers may send codes up to"
            f" {GRADIENT.largest}"
            f" // {workers} = 0: every gradient would be zero; choose int8 or int8_hier, whose"
            " precision does not fall "
            "with the number of workers"
        )
    return levels


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
