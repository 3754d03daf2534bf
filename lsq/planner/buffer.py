"""Buffers and plans in general: plain data that the planner writes and the validator reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lsq.memory import buffer as memory


@dataclass(frozen=True, kw_only=True)
class Buffer(memory.Buffer):
    """A buffer that may share bytes with others, lie at a given offset and belong to a pool.

    Raises:
        ValueError: a number is out of range, or the life is empty.
    """

    pool: str = "default"
    """Buffers of different pools never share a segment."""
    alias: str | None = None
    """Name of a buffer whose bytes it shares, as the result of an in-place operation does."""
    offset: int | None = None
    """Offset in bytes that is given rather than planned; it counts in the first segment of the pool."""

    def __post_init__(self):
        super().__post_init__()
        if self.alias == self.name:
            raise ValueError(f"buffer {self.name!r}: it is an alias of itself; name another buffer, or None")
        if self.offset is not None:
            self._require_range("offset", 0)
            if self.offset % self.alignment:
                raise ValueError(
                    f"buffer {self.name!r}: its fixed offset {self.offset} is no multiple of alignment {self.alignment}"
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


@dataclass(frozen=True, kw_only=True)
class Block(Buffer):
    """What is planned as one: a buffer together with all its aliases, from the first to the last use of any."""

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
    return Block(
        name=names[0],
        size=max(buffer.size for buffer in members),
        first=min(buffer.first for buffer in members),
        last=max(buffer.last for buffer in members),
        alignment=max(buffer.alignment for buffer in members),
        offset=offsets[0] if offsets else None,
        pool=pools[0],
        names=names,
    )


def bound_of_pool(blocks: Sequence[Block]) -> int:
    """Bytes that no plan of blocks of one pool can do with less than.

    The larger of the largest sum of bytes alive at one time, and the end of the highest fixed block.
    """
    highest = max((block.offset + block.size for block in blocks if block.offset is not None and block.size), default=0)
    return max(highest, max((load for _, load in memory.live_load(blocks)), default=0))


def fixed_offsets(blocks: Sequence[Block]) -> dict[int, int]:
    """The offsets that are given, by index."""
    return {index: block.offset for index, block in enumerate(blocks) if block.offset is not None}
