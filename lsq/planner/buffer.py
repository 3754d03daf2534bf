"""Buffers and plans in general: plain data that the planner writes and the validator reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from lsq.memory import buffer as memory


@dataclass(frozen=True, kw_only=True)
class Buffer(memory.Buffer):
    """A buffer that may belong to a pool.

    Raises:
        ValueError: a number is out of range, or the life is empty.
    """

    pool: str = "default"
    """Buffers of different pools never share a segment."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Segment and offset of every buffer."""

    offsets: dict[str, int]
    """Buffer -> bytes from the start of its segment."""
    segments: dict[str, int]
    """Buffer -> index of its segment."""
    used: tuple[int, ...]
    """Bytes per segment up to the end of its highest buffer."""
    capacities: tuple[int, ...]
    """Bytes per segment to allocate: `used`, rounded up where segments are."""
    pools: tuple[str, ...]
    """Per segment, the pool that it belongs to."""
    lower_bound: int
    """Bytes that no plan can do with less than: `bound_of_pool`, summed over pools."""
    method: str
    """The planner's method."""
    seconds: float
    """Time that planning took."""
    capacity_met: bool | None = None
    """Whether every pool keeps to the capacity that was asked for; None where none was."""

    @property
    def peak(self) -> int:
        """Bytes used: the sum over segments of the end of the highest buffer."""
        return sum(self.used)

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound, relative to it; 0 is optimal."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def bound_of_pool(buffers: Sequence[Buffer]) -> int:
    """Bytes that no plan of the buffers of one pool can do with less than: the largest sum alive at one time."""
    return max((load for _, load in memory.live_load(buffers)), default=0)
