"""How a product runs on a GPU, the rule for untuned products, and measured times: the checked data
of tuned files.

Every error is a ValueError that begins with the name of the field.
"""

import contextlib
import datetime
import math
from dataclasses import dataclass
from typing import ClassVar

from lsq.files.json_file import check_choice, check_number, check_whole, shown
from lsq.gemm.operations import OVER_TOKENS, TILED, TILED_ALONE
from lsq.gemm.product_key import EXACT_TOKENS, MATMUL, TOKEN_STEP, ProductKey
from lsq.native.geometry import MULTIPROCESSORS

ALGORITHM_BYTES = 64
TILE_ROWS = (64, 128)
TILE_COLUMNS = {"mma": (64, 128), "wgmma": (64, 128, 256)}
"""By instruction."""
TILE_STAGES = {"mma": (2, 8), "wgmma": (3, 5)}
"""Least and most, by instruction."""
WGMMA_SM = 90
"""10 times the compute capability of the GPUs that have "wgmma"."""
MOST_SPLIT = 32
TILE_STEP = {"mma": 64, "wgmma": 128}
"""Values along K in a stage of csrc/cuda/product_copies.cuh, by instruction; codes, so each row
takes this many bytes."""
WGMMA_SUMS = 128 * 128
"""Most sums of a tile by wgmma: 128 in each thread of a warpgroup."""
MOST_TILE_ROWS = 65535
"""Most rows of tiles in a grid."""
LARGEST_TIME = 1e12
LARGEST_SPREAD = 1e6

# The rule follows a model of GPUs (benchmarks/model_gpu_step.py, docs/gpu.md); nothing of it is
# measured.
SIDES = ((128, 128), (128, 64), (64, 64))
"""Rows and columns of tiles, the fastest first."""
FILLED = 7 / 8
"""Part of the multiprocessors that must have a tile; else tiles get smaller, and slower."""
FEW_ROWS = 64
"""Products of at most this many rows have tiles of this many rows."""
SHARED_BYTES = {"mma": 48 * 1024, "wgmma": 227 * 1024}
"""Most bytes of shared memory of a block, by instruction. With mma, two blocks fit a multiprocessor
of every GPU; with wgmma one block takes a multiprocessor, and no tile needs more."""
STAGES = {"mma": 4, "wgmma": 5}
INNER_OF_A_PART = 1024
"""Least values along K in a part."""
INNER_OF_SUMS = 128
"""Values along K that a block multiplies while it writes the sums of a part, or reads another's."""
MOST_PARTS = 8
MOST_TURNS = 5
"""Most turns that multiprocessors take where K is split. With more turns, an idle last one costs
less than the memory of the parts."""
FASTER_LIBRARIES = range(90, 120)
"""10 times the compute capabilities of GPUs whose libraries multiply faster."""
LONGEST_BESIDE_FASTER_PRODUCTS = {"mma": 512, "wgmma": 4096}
"""Largest K of tiles there. For longer K, sums in memory cost less than slower multiplication."""
_DATE = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class CublasConfiguration:
    """An algorithm of cuBLASLt; another kernel applies the epilogue. Raises ValueError: a field is
    wrong."""

    algorithm: bytes
    """64 bytes, hexadecimal in files; valid for one version of the library and one GPU model."""
    workspace_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, bytes) or len(self.algorithm) != ALGORITHM_BYTES:
            is_bytes = isinstance(self.algorithm, bytes)
            given = f"{len(self.algorithm)} bytes" if is_bytes else repr(self.algorithm)
            raise ValueError(
                f"algorithm is {given}; it must be {ALGORITHM_BYTES} bytes: tune again"
            )
        check_whole("workspace_bytes", self.workspace_bytes, 0, 2**40)

    def check_key(self, key: ProductKey) -> None:
        """Raise ValueError if this configuration cannot run a product."""
        if key.op in TILED_ALONE:
            raise ValueError(f"algorithm is of cuBLASLt, which has no part in {key.op}: tune again")
        if key.op == MATMUL and key.dtype == "int8" and key.layout != "nt":
            raise ValueError(
                f'algorithm is of cuBLASLt, which multiplies int8 as "nt", not {key.layout!r}: tune'
                " again"
            )

    def __str__(self) -> str:
        return f"cuBLASLt by {self.algorithm[:16].hex()}..., {self.workspace_bytes} bytes"


@dataclass(frozen=True, kw_only=True)
class TileConfiguration:
    """The tiles of a kernel of lsq that makes a product and its epilogue on a GPU. Raises
    ValueError: the kernels have no such tile."""

    ROWS: ClassVar = TILE_ROWS
    rows: int
    """Rows of sums in a block: 64 or 128."""
    columns: int
    """64 or 128; with "wgmma" also 256."""
    stages: int
    """Steps along K that a block holds in shared memory: 2 to 8; with "wgmma" at least 3."""
    split: int = 1
    """Parts of K, each for its own blocks; 1 except for weight gradients."""
    instruction: str = "mma"
    """"mma" (mma.sync), or "wgmma", which only GPUs of compute capability 9.0 have."""

    def __post_init__(self) -> None:
        check_choice("instruction", self.instruction, tuple(TILE_COLUMNS))
        for name, allowed in (("rows", self.ROWS), ("columns", TILE_COLUMNS[self.instruction])):
            value = getattr(self, name)
            if not isinstance(value, int) or value not in allowed:
                raise ValueError(
                    f"{name} is {shown(value)}; allowed: {', '.join(map(str, allowed))}"
                )
        check_whole("stages", self.stages, *TILE_STAGES[self.instruction])
        check_whole("split", self.split, 1, MOST_SPLIT)
        if self.instruction != "wgmma":
            return
        if self.rows * self.columns > WGMMA_SUMS:
            raise ValueError(
                f"columns is {self.columns}; with {self.rows} rows wgmma has at most"
                f" {WGMMA_SUMS // self.rows}: tune again"
            )
        if self.shared_bytes > SHARED_BYTES["wgmma"]:
            most = self.stages - -(-(self.shared_bytes - SHARED_BYTES["wgmma"]) // self.stage_bytes)
            raise ValueError(
                f"stages is {self.stages}; shared memory holds at most {most} of {self.rows} x"
                f" {self.columns}: tune again"
            )

    @property
    def warps(self) -> tuple[int, int]:
        """Warps that share a tile's sums, down and across."""
        return (4, 1) if self.instruction == "wgmma" else (2, 2)

    @property
    def block_warps(self) -> int:
        """Warps of a block: those of its tiles, and by wgmma those that copy."""
        return 12 if self.instruction == "wgmma" else 4

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * TILE_STEP[self.instruction]

    @property
    def end_bytes(self) -> int:
        """Shared memory beside the stages: kEndBytes of csrc/cuda/product_wgmma.cuh, twice."""
        if self.instruction != "wgmma":
            return 0
        return 2 * (math.prod(self.warps) * 8 * 16 * (self.columns // 4 + 2) + 36 * self.rows)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.end_bytes

    def blocks(self, m: int, n: int) -> tuple[int, int]:
        """Return (tiles across, tiles down) of a product [M, N]; one row of tiles if M is 0."""
        return -(-n // self.columns), max(1, -(-m // self.rows))

    def check_key(self, key: ProductKey) -> None:
        if key.op not in TILED:
            raise ValueError(
                f"rows is of a tile, which ends products of {', '.join(TILED)}, not {key.op}: tune"
                " again"
            )
        for name in ("n", "k"):
            if getattr(key, name) % 16:
                raise ValueError(
                    f"rows is of a tile, and {name} is {getattr(key, name)}, no multiple of 16:"
                    " tune again"
                )
        if self.blocks(key.m, key.n)[1] > MOST_TILE_ROWS:
            raise ValueError(
                f"rows is {self.rows}, of which {key.m} are more than {MOST_TILE_ROWS} tiles: tune"
                " again"
            )
        if self.split > 1 and key.op != OVER_TOKENS:
            raise ValueError(f"split is {self.split}; of {key.op} it is 1")

    def __str__(self) -> str:
        split = f", K in {self.split} parts" if self.split > 1 else ""
        by = " by wgmma" if self.instruction == "wgmma" else ""
        return f"tiles of {self.rows} x {self.columns}{by}, {self.stages} stages{split}"


Configuration = CublasConfiguration | TileConfiguration


def default_tile(
    key: ProductKey, sm: int | None = None, multiprocessors: int = MULTIPROCESSORS
) -> TileConfiguration | None:
    """Return the tile for an untuned product; None: cuBLASLt multiplies (never for TILED_ALONE).
    Tiles shrink, and K is split, until they keep most multiprocessors busy.

    Args:
        key: the product.
        sm: compute capability, e.g. 90; None: a GPU that multiplies int8 fastest by mma.sync.
        multiprocessors: of the GPU.
    """
    instruction = "wgmma" if sm == WGMMA_SM else "mma"
    if key.op not in TILED_ALONE and _is_left_to_cublaslt(key, sm, instruction):
        return None
    parts = MOST_PARTS if key.op == OVER_TOKENS else 1
    parts = max(1, min(parts, key.k // INNER_OF_A_PART))
    for rows, columns in SIDES:
        rows = FEW_ROWS if key.m <= FEW_ROWS else rows
        tiles = -(-key.m // rows) * -(-key.n // columns)
        if tiles * parts >= FILLED * multiprocessors:
            break
    stages = SHARED_BYTES["mma"] // (TILE_STEP["mma"] * (rows + columns))
    stages = STAGES["wgmma"] if instruction == "wgmma" else min(STAGES["mma"], stages)
    splits = range(1, parts + 1)
    split = min(splits, key=lambda split: _length(key.k, tiles, split, multiprocessors))
    return TileConfiguration(
        rows=rows, columns=columns, stages=stages, split=split, instruction=instruction
    )


def _length(k: int, tiles: int, split: int, multiprocessors: int) -> float:
    """Return the time of all tiles with K in `split` parts. Its unit is that in which a block
    multiplies one value along K."""
    turns = math.ceil(tiles * split / multiprocessors)
    if split == 1:
        return turns * k
    if turns > MOST_TURNS:
        return math.inf
    return turns * (k / split + INNER_OF_SUMS) + (split - 1) * INNER_OF_SUMS


def _is_left_to_cublaslt(key: ProductKey, sm: int | None, instruction: str) -> bool:
    """Return whether no tile can run the product, or a library multiplies it faster."""
    if key.op not in TILED or key.n % 16 or key.k % 16 or key.m > 64 * MOST_TILE_ROWS:
        return True
    return sm in FASTER_LIBRARIES and key.k > LONGEST_BESIDE_FASTER_PRODUCTS[instruction]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Medians in microseconds. Raises ValueError: a time is not above 0."""

    chosen: float
    default: float
    """Time of the untuned product."""
    float: float
    """Time of the same product of floats."""
    other: float | None = None
    """Best time of the other kind: cuBLASLt if a tile was chosen, or the reverse; None: none was
    near."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "other" and value is None:
                continue
            check_number(name, value, LARGEST_TIME)
            if value == 0:
                raise ValueError(f"{name} is 0; a product takes time: measure it again")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The best configuration of a product. Raises ValueError: it does not suit the product, or a
    field is wrong."""

    key: ProductKey
    configuration: Configuration
    times: Times
    spread: float
    """Interquartile range of the chosen configuration's times, relative to their median."""
    date: str
    """Time of the measurement: YYYY-MM-DDThh:mm:ssZ, UTC."""

    def __post_init__(self) -> None:
        if self.key != self.key.rounded():
            raise ValueError(
                f"key is {self.key}; above {EXACT_TOKENS} tokens only multiples of {TOKEN_STEP}"
                f" have entries: use {self.key.rounded()}"
            )
        try:
            self.configuration.check_key(self.key)
        except ValueError as error:
            raise ValueError(f"configuration.{error}") from None
        check_number("spread", self.spread, LARGEST_SPREAD)
        with contextlib.suppress(ValueError, TypeError):
            if datetime.datetime.strptime(self.date, _DATE).strftime(_DATE) == self.date:
                return
        raise ValueError(
            f"date is {shown(self.date)}; it must be a time in UTC like 2026-01-31T23:59:59Z"
        )

    @property
    def gain(self) -> float:
        return self.times.default / self.times.chosen


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime(_DATE)
