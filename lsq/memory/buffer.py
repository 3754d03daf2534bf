"""Buffers with their lives, and plans of where they lie: plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST = 2**62
"""Sizes, offsets and operation indices stay below this, so that sums of two fit into 64 bits."""
DEFAULT_ALIGNMENT = 256
"""Bytes: what cudaMalloc gives, and more than any vector instruction needs."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Bytes that hold one value from the operation that writes it to the last one that reads it.

    Raises:
        ValueError: a number is out of range, the life is empty, or the offset is not aligned.
    """

    name: str
    size: int
    """Bytes; 0 is allowed and occupies nothing."""
    first: int
    """Index of the first operation that uses it."""
    last: int
    """Index of the last operation that uses it, inclusive."""
    alignment: int = DEFAULT_ALIGNMENT
    """The offset is a multiple of this power of two."""
    offset: int | None = None
    """Bytes from the start of the memory, fixed; None: the planner chooses."""

    def __post_init__(self):
        self._require_range("size", 0)
        self._require_range("first", -LARGEST)
        self._require_range("last", -LARGEST)
        self._require_range("alignment", 1)
        if self.last < self.first:
            raise ValueError(
                f"buffer {self.name!r}: it lives from {self.first} to {self.last}; last must not"
                " be before first"
            )
        if self.alignment & (self.alignment - 1):
            raise ValueError(
                f"buffer {self.name!r}: alignment is {self.alignment}; it must be a power of two"
            )
        if self.offset is not None:
            self._require_range("offset", 0)
            if self.offset % self.alignment:
                raise ValueError(
                    f"buffer {self.name!r}: offset is {self.offset}; it must be a multiple of its "
                    f"alignment, {self.alignment}"
                )

    def _require_range(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or not lowest <= value <= LARGEST:
            raise ValueError(
                f"buffer {self.name!r}: {name} is {value!r}; it must be a whole number from"
                f" {lowest} to 2^62"
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
    """Bytes per segment to allocate: `used`, rounded up if the plan has a cap."""
    lower_bound: int
    """Bytes that every plan needs."""
    method: str
    """The planner's method."""
    seconds: float
    """Time that planning took."""
    capacity_met: bool | None = None
    """Whether the plan keeps to the requested capacity; None without one."""

    @property
    def peak(self) -> int:
        """Bytes used, summed over segments."""
        return sum(self.used)

    @property
    def gap(self) -> float:
        """Peak above the lower bound, relative to it; 0 is optimal."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def live_load(buffers: Iterable[Buffer]) -> list[tuple[int, int]]:
    """(operation, bytes alive from it on) wherever that changes, in order of time."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - buffer.size
    load, curve = 0, []
    for time, change in sorted(changes.items()):
        load += change
        curve.append((time, load))
    return curve


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Bytes that every plan needs: the largest live load, or the highest fixed end."""
    ends = [each.offset + each.size for each in buffers if each.size and each.offset is not None]
    return max([*(load for _, load in live_load(buffers)), *ends], default=0)


def fixed_offsets(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Index -> offset of the buffers that no plan may move."""
    return {i: buffer.offset for i, buffer in enumerate(buffers) if buffer.offset is not None}
