"""Modelled times of what a GPU does. Nothing here is measured.

A kernel takes as long as the slowest of what it needs: memory, the L2 cache, the L1 cache and
shared memory, instructions of each kind; and a gap before the next one. Blocks that do not fit
beside the others come after them. A product takes as long as its multiplications in tiles of the
best size, or its operands in memory or in the L2 cache, from which tiles read them again; one that
a kernel ends, as its multiplications by mma.sync or wgmma in its own tiles and those instructions
of its end that do not run beside them. What an earlier kernel has left in the L2 cache is not read
from memory again. gpu_assumptions.py says of each number where it is from.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from lsq.emulator import profile
from lsq.emulator.profile import WARP, Limits, Profile, Traffic, fitting_blocks
from lsq.gemm.configuration import TileConfiguration
from lsq.native.launch import Launch

SECTOR = 32
PARTS = "memory", "L2 cache", "L1 cache", "instructions"
"""What a kernel may wait for."""
SPARSE = 0.5
"""Of a tensor that does not grow with the batch; where less of it is touched, more is touched in a
larger batch."""


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def place_of(tensor: torch.Tensor) -> tuple:
    """A key that is equal for the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a launch does: bytes by the place of their tensor, each counted once, and work by warps.

    A tensor that grows with the batch is read and written as often as at few tokens; one that does
    not, is read by as many more warps as there is more work, and once from memory. One that grows
    more than the work is touched in part.
    """

    reads: dict[object, float]
    writes: dict[object, float]
    sectors: float
    """Of all requests."""
    shared_passes: float
    instructions: dict[str, float]
    warps: int
    warps_of_block: int

    @staticmethod
    def of(counted: Profile, entry: Launch, shared: float = 1.0) -> "Work":
        """Scale counts on small tensors to a launch on large ones; `shared` launches share it."""
        tensors = profile.operands_of(entry)
        work = growth(counted, tensors) / shared
        reads: dict[object, float] = {}
        writes: dict[object, float] = {}
        sectors = 0.0
        for real, one in zip(tensors, counted.operands, strict=True):
            own = min(bytes_of(real) / one.bytes, work) if one.bytes else 0.0
            for traffic, moved in ((one.reads, reads), (one.writes, writes), (one.atomics, writes)):
                touched = scaled_bytes(traffic, one.bytes, bytes_of(real), work)
                if touched:
                    moved[place_of(real)] = moved.get(place_of(real), 0.0) + touched
                sectors += traffic.sectors * (own if own > 1 else work)
        block = entry.block[0] * entry.block[1] * entry.block[2]
        return Work(
            reads=reads,
            writes=writes,
            sectors=sectors,
            shared_passes=counted.shared_passes * work,
            instructions={kind: number * work for kind, number in counted.instructions.items()},
            warps=-(-block // profile.WARP) * entry.grid[0] * entry.grid[1] * entry.grid[2],
            warps_of_block=-(-block // profile.WARP),
        )


def growth(counted: Profile, tensors: list[torch.Tensor]) -> float:
    pairs = zip(tensors, counted.operands, strict=True)
    grown = (
        bytes_of(real) / one.bytes for real, one in pairs if one.reads.touched + one.writes.touched
    )
    return max(grown, default=1.0)


def scaled_bytes(traffic: Traffic, counted: int, real: int, work: float) -> float:
    """Bytes touched of a tensor of `real` bytes, from counts on one of `counted` bytes."""
    touched = traffic.touched * SECTOR
    if not touched:
        return 0.0
    grows = min(real / counted, work)
    if grows <= 1 and touched < SPARSE * counted:
        grows = work
    return min(touched * grows, real)


TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.88), (64, 64, 0.55))
"""Rows and columns of a product that a block makes, and its rate beside the largest tile's, turned
or not."""
RAMP = 128
"""A product with this many multiplications to a result runs at half of its rate."""
ONE_WARPGROUP = 2 / 3
"""Part of the instructions' rate of all warps that reaches a warpgroup which ends a tile alone."""
LATENCY = 700e-9
"""Seconds until a read from memory comes back."""
IN_FLIGHT = 1024
"""Bytes that a warp has under way."""
SLOTS = {
    "division": {"special": 1, "float": 8},
    "root": {"special": 1, "float": 8},
    "logarithm": {"float": 20},
    "convert": {"convert": 1},
    "float": {"float": 1},
    "integer": {"integer": 1},
    "multiply": {"integer": 1},
    "permute": {"integer": 1},
    "branch": {"issue": 1},
    "memory": {"issue": 1},
    "exchange": {"exchange": 1},
    "barrier": {"issue": 8},
    "mma": {"tensor": 1},
    "wgmma": {"issue": 1},
}
"""What each kind of instruction of lsq.emulator.profile takes of a multiprocessor's units."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet, and how much of that is reached."""

    name: str
    target: str
    multiprocessors: int
    gigahertz: float
    memory: float
    copying: float
    """Part of it that a copy reaches."""
    l2_bytes: float
    l2: float
    bfloat16: float
    """Operations a second of products, dense, with float32 sums."""
    int8: float
    """The same with int32 sums."""
    bfloat16_reached: float
    """Part of it that a large product reaches."""
    int8_reached: float
    limits: Limits
    lanes: Mapping[str, int]
    """By kind of unit: threads that a multiprocessor serves in a cycle."""
    mma: float = 1.0
    """Part of a library's int8 rate that mma.sync can reach; of the rest, where it is less, a
    library makes use."""
    wgmma: float = 1.0
    """Part of it that lsq's loop by wgmma reaches, of which copies have their own warps."""
    multicast: float = 1.0
    """Part of the reads of tiles that a library's kernels leave to the L2 cache: blocks share some.
    """
    reached: float = 0.6
    """Part of the instructions' rate that kernels reach."""
    integers: float = 0.45
    """Part of g++'s integer instructions that a GPU executes: it joins logical ones and needs fewer
    for addresses.

    NVRTC's PTX of kernels without loops has 0.2 to 0.95 times as many, and machine code fewer than
    PTX.
    """
    gap: float = 2.5 * MICRO
    """Seconds from the end of a kernel to full work on the next."""
    overlapped: float = 1.0
    """Part of it that is left before lsq's kernels: from compute capability 9.0 on, their blocks
    start while the launch before ends."""
    past_l1: float = 0.85
    """Part of the sectors that warps ask for that the L1 cache does not hold."""
    kept: float = 0.6
    """Part of the L2 cache that still holds what was touched last."""
    beside: float = 0.5
    """Part of an epilogue that runs while the other block of its multiprocessor multiplies."""

    @property
    def sm(self) -> int:
        return int(self.target.removeprefix("sm_").rstrip("a"))

    @property
    def copy(self) -> float:
        return self.memory * self.copying


def _lanes(floats: int, tensor: int) -> dict[str, int]:
    """`tensor`: of int8 products of 16 x 8 x 32, by the data sheet's dense peak."""
    return {
        "issue": 128,
        "float": floats,
        "integer": 64,
        "special": 16,
        "convert": 64,
        "exchange": 32,
        "tensor": tensor,
    }


A100 = Gpu(
    name="A100 80 GB",
    target="sm_80",
    multiprocessors=108,
    gigahertz=1.35,
    memory=2.04 * TERA,
    copying=0.87,
    l2_bytes=40e6,
    l2=5.4 * TERA,
    bfloat16=312 * TERA,
    int8=624 * TERA,
    bfloat16_reached=0.84,
    int8_reached=0.65,
    limits=Limits(warps=64, blocks=32, shared=164 * 1024),
    lanes=_lanes(64, 16),
)
RTX_4090 = Gpu(
    name="RTX 4090",
    target="sm_89",
    multiprocessors=128,
    gigahertz=2.5,
    memory=1.008 * TERA,
    copying=0.91,
    l2_bytes=72e6,
    l2=5.0 * TERA,
    bfloat16=165 * TERA,
    int8=660 * TERA,
    bfloat16_reached=0.95,
    int8_reached=0.72,
    limits=Limits(warps=48, blocks=24, shared=100 * 1024),
    lanes=_lanes(128, 8),
)
H100 = Gpu(
    name="H100 SXM",
    target="sm_90a",
    multiprocessors=132,
    gigahertz=1.7,
    memory=3.35 * TERA,
    copying=0.90,
    l2_bytes=50e6,
    l2=7.5 * TERA,
    bfloat16=989 * TERA,
    int8=1979 * TERA,
    bfloat16_reached=0.81,
    int8_reached=0.65,
    limits=Limits(warps=64, blocks=32, shared=228 * 1024),
    lanes=_lanes(128, 32),
    mma=0.62,
    wgmma=0.85,
    multicast=2 / 3,
    overlapped=0.6,
)
GPUS = (A100, RTX_4090, H100)


def variant(gpu: Gpu, luck: float) -> Gpu:
    """The GPU if what nobody has measured is better (`luck` 1) or worse (-1)."""
    return replace(
        gpu,
        int8_reached=gpu.int8_reached + 0.12 * luck,
        wgmma=gpu.wgmma + 0.1 * luck if gpu.wgmma < 1 else gpu.wgmma,
        reached=gpu.reached + 0.2 * luck,
        gap=gpu.gap * 2.0**-luck,
        l2=gpu.l2 * 1.25**luck,
        kept=gpu.kept + 0.3 * luck,
        past_l1=gpu.past_l1 - 0.15 * luck,
        integers=gpu.integers * 1.5**-luck,
        beside=gpu.beside + 0.5 * luck,
    )


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that something reads and writes, by what holds them; equal keys are the same memory."""

    reads: Mapping[object, float]
    writes: Mapping[object, float]


@dataclass(frozen=True, kw_only=True)
class Multiplied(Moved):
    """A product [M, N] with K multiplications to a result."""

    m: int
    n: int
    k: int
    int8: bool = False


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one launch."""

    seconds: float
    bound: str
    """What it waits for most."""
    gap: float
    bytes: float
    """Moved to and from memory."""

    @property
    def total(self) -> float:
        return self.seconds + self.gap


class Cache:
    """Which memory the L2 cache holds: what was touched last."""

    def __init__(self, size: float):
        self._room = size
        self._held: OrderedDict[object, float] = OrderedDict()

    def read(self, place: object, size: float) -> float:
        """Bytes of it that must come from memory."""
        missing = max(0.0, size - self._held.get(place, 0.0))
        self._touch(place, size)
        return missing

    def write(self, place: object, size: float) -> float:
        """Bytes of it that must go to memory, sooner or later: all."""
        self._touch(place, size)
        return size

    def _touch(self, place: object, size: float) -> None:
        self._held.pop(place, None)
        self._held[place] = min(size, self._room)
        while sum(self._held.values()) > self._room:
            self._held.popitem(last=False)


class Clock:
    """Models launches one after another on a GPU whose cache begins empty."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self._cache = Cache(gpu.kept * gpu.l2_bytes)

    def moved(self, moved: Moved) -> Time:
        """A kernel that does nothing but move bytes."""
        traffic, touched = self._traffic(moved)
        return self._slowest(
            {"memory": traffic / self.gpu.copy, "L2 cache": touched / self.gpu.l2}, traffic
        )

    def product(self, product: Multiplied) -> Time:
        """A product by a library, in the tiles that are best for it."""
        gpu = self.gpu
        peak = gpu.int8 * gpu.int8_reached if product.int8 else gpu.bfloat16 * gpu.bfloat16_reached
        traffic, touched = self._traffic(product)
        results = touched - sum(product.reads.values())
        work = 2.0 * product.m * product.n * product.k

        def parts(tile: tuple[int, int, float]) -> dict[str, float]:
            read = gpu.multicast * tile_bytes(product, *tile[:2])
            return {
                "products": work / peak / tile_rate(product, tile, gpu.multiprocessors),
                "memory": traffic / gpu.copy,
                "L2 cache": (results + read) / gpu.l2,
            }

        best = min(map(parts, TILES), key=lambda found: max(found.values()))
        return self._slowest(best, traffic)

    def ended_product(self, product: Multiplied, end: Work, tile: TileConfiguration) -> Time:
        """A product of codes and its end in one kernel.

        Args:
            product: what is multiplied; its result goes nowhere.
            end: what was counted of the kernel that ends it elsewhere.
            tile: as lsq.gemm has it.
        """
        gpu = self.gpu
        sums = product.writes.keys()
        reads = {
            **product.reads,
            **{place: size for place, size in end.reads.items() if place not in sums},
        }
        traffic, touched = self._traffic(Moved(reads=reads, writes=end.writes))
        work = 2.0 * product.m * product.n * product.k
        peak = gpu.int8 * gpu.int8_reached * getattr(gpu, tile.instruction)
        shape = next(one for one in TILES if {*one[:2]} == {tile.rows, tile.columns})
        shape = tile.rows, tile.columns, shape[2]
        cycles = gpu.multiprocessors * gpu.gigahertz * GIGA
        ended = instruction_cycles(end.instructions, gpu) / cycles / gpu.reached
        of_tiles = tile_bytes(product, tile.rows, tile.columns)
        parts = 2 * tile.split - 1 if tile.split > 1 else 0  # written, and all but one read
        of_parts = 4.0 * product.m * product.n * parts
        if tile.instruction == "mma":
            multiplied = work / peak / tile_rate(product, shape, gpu.multiprocessors, tile.split)
            taken = multiplied + ended - gpu.beside * min(multiplied, ended)
        else:  # blocks stay, and only the last tile's end runs beside no multiplications
            tiles = tile.split * math.prod(tile.blocks(product.m, product.n))
            turns = math.ceil(tiles / gpu.multiprocessors)
            rate = tile_rate(product, shape, gpu.multiprocessors, tile.split, RAMP / turns)
            multiplied, ended = work / peak / rate, ended / ONE_WARPGROUP
            taken = max(multiplied + ended / turns, ended)
        times = {
            "products": taken + of_parts / gpu.l2,
            "memory": traffic / gpu.copy,
            "L2 cache": (touched - sum(product.reads.values()) + of_tiles + of_parts) / gpu.l2,
        }
        return self._slowest(times, traffic, gpu.overlapped)

    def kernel(self, work: Work, registers: int, shared: int) -> Time:
        """A kernel that was counted; registers of a thread, bytes of shared memory of a block."""
        gpu = self.gpu
        traffic, _ = self._traffic(Moved(reads=work.reads, writes=work.writes))
        fitting = max(1, fitting_blocks(WARP * work.warps_of_block, registers, shared, gpu.limits))
        beyond_l1 = work.sectors * gpu.past_l1
        executed = instruction_cycles(work.instructions, gpu) / gpu.reached

        def parts(blocks: float) -> dict[str, float]:
            """What all of it takes while so many blocks run."""
            under_way = blocks * work.warps_of_block * IN_FLIGHT
            cycles = min(blocks, gpu.multiprocessors) * gpu.gigahertz * GIGA
            return {
                "memory": traffic / min(gpu.copy, under_way / LATENCY),
                "L2 cache": beyond_l1 * SECTOR / gpu.l2,
                "L1 cache": (work.shared_passes + work.sectors / 4) / cycles,
                "instructions": executed / cycles,
            }

        blocks, room = work.warps / work.warps_of_block, gpu.multiprocessors * fitting
        last = blocks % room or room
        waves = [(room, blocks - last), (last, last)]
        shares = [(parts(running), done / blocks) for running, done in waves if done]
        whole = {part: sum(share * one[part] for one, share in shares) for part in PARTS}
        return self._slowest(whole, traffic, gpu.overlapped)

    def _traffic(self, moved: Moved) -> tuple[float, float]:
        """Bytes to and from memory, and to and from the cache."""
        reads = sum(self._cache.read(place, size) for place, size in moved.reads.items())
        writes = sum(self._cache.write(place, size) for place, size in moved.writes.items())
        return reads + writes, sum(moved.reads.values()) + sum(moved.writes.values())

    def _slowest(self, parts: Mapping[str, float], traffic: float, gaps: float = 1.0) -> Time:
        bound, gap = max(parts, key=parts.get), gaps * self.gpu.gap
        return Time(seconds=parts[bound], bound=bound, gap=gap, bytes=traffic)


def instruction_cycles(instructions: Mapping[str, float], gpu: Gpu) -> float:
    """The least cycles in which a multiprocessor executes instructions of warps."""
    units = dict.fromkeys(gpu.lanes, 0.0)
    for kind, count in instructions.items():
        executed = count * gpu.integers if kind == "integer" else count
        for unit, slots in SLOTS[kind].items():
            units[unit] += executed * slots
            if unit != "issue":
                units["issue"] += executed * slots
    return max(WARP * count / gpu.lanes[unit] for unit, count in units.items())


def tile_rate(
    product: Multiplied,
    tile: tuple[int, int, float],
    multiprocessors: int,
    split: int = 1,
    ramp: float = RAMP,
) -> float:
    """Part of a large product's rate that this shape reaches with a tile as in `TILES`."""
    rows, columns, beside = tile
    inner = product.k / split
    return beside * filled(product, rows, columns, split, multiprocessors) * inner / (inner + ramp)


def tile_bytes(product: Multiplied, rows: int, columns: int) -> float:
    """Bytes of operands that all tiles of this size read."""
    values = product.m * product.n * product.k * (1 / rows + 1 / columns)
    return values if product.int8 else 2 * values


def filled(product: Multiplied, rows: int, columns: int, times: int, multiprocessors: int) -> float:
    """Part of whole waves of tiles that a product fills; tiles are made `times` times."""
    tiles = times * math.ceil(product.m / rows) * math.ceil(product.n / columns)
    waves = math.ceil(tiles / multiprocessors)
    return times * product.m * product.n / (rows * columns) / (waves * multiprocessors)


def total(times: Iterable[Time]) -> float:
    return sum(time.total for time in times)
