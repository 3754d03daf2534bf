"""Buffers and plans in general: plain data that the planner writes and the validator reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from lsq.memory import buffer as memory


@dataclass(frozen=True, kw_only=True)
class Buffer(memory.Buffer):
    """A buffer that may belong to a pool, and may have an offset that no plan changes.

    Raises:
        ValueError: a number is out of range, the life is empty, or the offset is not aligned.
    """

    pool: str = "default"
    """Buffers of different pools never share a segment."""
    offset: int | None = None
    """Bytes from the start of its pool; None: the planner chooses."""

    def __post_init__(self):
        super().__post_init__()
        if self.offset is not None:
            self._require_range("offset", 0)
            if self.offset % self.alignment:
                raise ValueError(
                    f"buffer {self.name!r}: offset is {self.offset}; it must be a multiple of its "
                    f"alignment, {self.alignment}"
                )


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
    """Bytes that no plan of the buffers of one pool can do with less than.

    That is the largest sum alive at one time, or the highest end of those whose offset is given.
    """
    ends = [one.offset + one.size for one in buffers if one.size and one.offset is not None]
    return max([*(load for _, load in memory.live_load(buffers)), *ends], default=0)


def given_offsets(buffers: Sequence[Buffer]) -> dict[int, int]:
    """The offsets that no plan changes, by the number of their buffer."""
    return {number: one.offset for number, one in enumerate(buffers) if one.offset is not None}
