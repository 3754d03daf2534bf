"""Buffers with their lives, and plans: plain data that the planner writes and the validator reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST = 2**62
"""Sizes, offsets and operation indices stay below this, so that sums of two fit into 64 bits."""

DEFAULT_ALIGNMENT = 256
"""What cudaMalloc gives, and more than any vector instruction needs."""


def _require_range(owner: str, name: str, value: int, lowest: int) -> None:
    if not isinstance(value, int) or not lowest <= value <= LARGEST:
        raise ValueError(f"{owner}: {name} is {value!r}; it must be a whole number from {lowest} to 2^62")


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
    pool: str = "default"
    """Buffers of different pools never share a segment."""
    alias: str | None = None
    """Name of a buffer whose bytes it shares, as the result of an in-place operation does."""
    offset: int | None = None
    """Offset in bytes that is given rather than planned; it counts in the first segment of the pool."""

    def __post_init__(self):
        owner = f"buffer {self.name!r}"
        _require_range(owner, "size", self.size, 0)
        _require_range(owner, "first", self.first, -LARGEST)
        _require_range(owner, "last", self.last, -LARGEST)
        _require_range(owner, "alignment", self.alignment, 1)
        if self.last < self.first:
            raise ValueError(f"{owner}: it lives from {self.first} to {self.last}; last must not be before first")
        if self.alignment & (self.alignment - 1):
            raise ValueError(f"{owner}: alignment is {self.alignment}; it must be a power of two")
        if self.alias == self.name:
            raise ValueError(f"{owner}: it is an alias of itself; name another buffer, or None")
        if self.offset is not None:
            _require_range(owner, "offset", self.offset, 0)


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
    """Bytes that no plan can do with less than."""
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


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is planned as one: a buffer together with all its aliases."""

    size: int
    """Bytes of its largest buffer."""
    first: int
    last: int
    """First and last operation of the union of lives, inclusive."""
    alignment: int
    """The strictest of its buffers'."""
    offset: int | None
    """The fixed offset, if a buffer has one."""
    pool: str
    names: tuple[str, ...]
    """Its buffers."""


def blocks_of(buffers: Iterable[Buffer]) -> list[Block]:
    """Join aliases into blocks, in the order of their first buffers.

    Raises:
        ValueError: two buffers have one name, an alias is unknown, or aliases differ in pool or fixed offset.
    """
    by_name: dict[str, Buffer] = {}
    for buffer in buffers:
        if by_name.setdefault(buffer.name, buffer) is not buffer:
            raise ValueError(f"two buffers are called {buffer.name!r}; names must differ")
    return [_block(members) for members in _alias_classes(by_name)]


def _alias_classes(by_name: dict[str, Buffer]) -> list[list[Buffer]]:
    """Disjoint sets (union by path halving) of buffers that share bytes."""
    parent = {name: name for name in by_name}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for buffer in by_name.values():
        if buffer.alias is not None:
            if buffer.alias not in by_name:
                raise ValueError(f"buffer {buffer.name!r} is an alias of {buffer.alias!r}, which is not a buffer")
            parent[root(buffer.name)] = root(buffer.alias)
    classes: dict[str, list[Buffer]] = {}
    for buffer in by_name.values():
        classes.setdefault(root(buffer.name), []).append(buffer)
    return list(classes.values())


def _block(members: Sequence[Buffer]) -> Block:
    names = tuple(buffer.name for buffer in members)
    pools = sorted({buffer.pool for buffer in members})
    offsets = sorted({buffer.offset for buffer in members if buffer.offset is not None})
    if len(pools) > 1:
        raise ValueError(f"the aliases {', '.join(names)} are in the pools {', '.join(pools)}; they must share one")
    if len(offsets) > 1:
        raise ValueError(f"the aliases {', '.join(names)} have the fixed offsets {offsets}; they must share one")
    alignment = max(buffer.alignment for buffer in members)
    if offsets and offsets[0] % alignment:
        raise ValueError(f"buffer {names[0]!r}: its fixed offset {offsets[0]} is no multiple of alignment {alignment}")
    return Block(
        size=max(buffer.size for buffer in members),
        first=min(buffer.first for buffer in members),
        last=max(buffer.last for buffer in members),
        alignment=alignment,
        offset=offsets[0] if offsets else None,
        pool=pools[0],
        names=names,
    )


def live_load(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """(operation, bytes alive from it on) wherever that changes, in order of time."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + block.size
        changes[block.last + 1] = changes.get(block.last + 1, 0) - block.size
    load, curve = 0, []
    for time, change in sorted(changes.items()):
        load += change
        curve.append((time, load))
    return curve


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """Bytes that no plan can do with less than: per pool, the larger of two, summed over pools.

    They are the largest sum of bytes alive at one time, aliases counted once, and the end of the highest fixed buffer.
    """
    pools: dict[str, list[Block]] = {}
    for block in blocks_of(buffers):
        pools.setdefault(block.pool, []).append(block)
    return sum(map(bound_of_pool, pools.values()))


def bound_of_pool(blocks: Sequence[Block]) -> int:
    """The lower bound of blocks of one pool, in bytes."""
    highest = max((block.offset + block.size for block in blocks if block.offset is not None and block.size), default=0)
    return max(highest, max((load for _, load in live_load(blocks)), default=0))
