"""Buffers with their lives, and where they lie: plain data."""

from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 2**62
"""Sizes, offsets and operation indices stay below this, so that sums of two fit into 64 bits."""

DEFAULT_ALIGNMENT = 256
"""What cudaMalloc gives, and more than any vector instruction needs."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Bytes that hold one value from the operation that writes it to the last one that reads it.

    Raises:
        ValueError: a number is out of range, or the life is empty.
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

    def __post_init__(self):
        self._require_range("size", 0)
        self._require_range("first", -LARGEST)
        self._require_range("last", -LARGEST)
        self._require_range("alignment", 1)
        owner = f"buffer {self.name!r}"
        if self.last < self.first:
            raise ValueError(
                f"{owner}: it lives from {self.first} to {self.last}; last must not be before first"
            )
        if self.alignment & (self.alignment - 1):
            raise ValueError(f"{owner}: alignment is {self.alignment}; it must be a power of two")

    def _require_range(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or not lowest <= value <= LARGEST:
            raise ValueError(
                f"buffer {self.name!r}: {name} is {value!r}; it must be a whole number from"
                f" {lowest} to 2^62"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The offset of every buffer."""

    offsets: dict[str, int]
    """Bytes from the start of the memory, by name."""
    peak: int
    """Bytes up to the end of the highest buffer."""
    lower_bound: int
    """The largest sum of bytes alive at one time; no plan can do with less."""
    seconds: float
    """Time that planning took."""

    @property
    def gap(self) -> float:
        """How far the peak is above the lower bound, relative to it; 0 is optimal."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0


def live_load(lives: Iterable) -> list[tuple[int, int]]:
    """(operation, bytes alive from it on) wherever that changes, in order of time.

    Each of `lives` has a size, a first and a last operation, as a Buffer has.
    """
    changes: dict[int, int] = {}
    for one in lives:
        changes[one.first] = changes.get(one.first, 0) + one.size
        changes[one.last + 1] = changes.get(one.last + 1, 0) - one.size
    load, curve = 0, []
    for time, change in sorted(changes.items()):
        load += change
        curve.append((time, load))
    return curve
