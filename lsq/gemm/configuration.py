"""How a matrix product is to be run, and how fast it was: plain, checked data.

An entry is a key with its configuration and its measured times; files (configuration_file.py) hold
many. Every error is a ValueError that begins with the name of the field, so that who reads a file
can put the place before it.
"""

import contextlib
import dataclasses
import datetime
from dataclasses import dataclass
from typing import ClassVar

from lsq.files.json_file import check_choice, check_number, check_whole, shown
from lsq.gemm.product_key import (
    EXACT_TOKENS,
    LARGEST_DIMENSION,
    MATMUL,
    TILED,
    TILED_ALONE,
    TOKEN_STEP,
    ProductKey,
)
from lsq.native import tiles

A_LAYOUTS = ("as_is", "padded", "mk")
B_LAYOUTS = ("as_is", "padded", "nk", "kn")
ONEDNN = "onednn"
KERNELS = (ONEDNN, *tiles.INSTRUCTIONS)

ALGORITHM_BYTES = 64
TILE_ROWS = (64, 128)
TILE_COLUMNS = {"mma": (64, 128), "wgmma": (64, 128, 256)}
"""By the instruction that multiplies."""
TILE_STAGES = {"mma": (2, 8), "wgmma": (3, 8)}
"""The least and the most."""
WGMMA_SM = 90
"""Compute capability of the GPUs that have "wgmma", times 10."""
MOST_SPLIT = 32
TILE_STEP = 64
"""Values along K in a stage of csrc/cuda/product.cuh, which is so many bytes of each row."""
MOST_TILE_ROWS = 65535
"""Rows of tiles that a grid has room for."""
LARGEST_TIME = 1e12
LARGEST_SPREAD = 1e6
_DATE = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class CpuConfiguration:
    """How the CPU runs an int8 product: with what, what is copied first, how many rows of sums are
    made at a time.

    Raises:
        ValueError: no such configuration.
    """

    kind: ClassVar[str] = "cpu"

    kernel: str = ONEDNN
    """"onednn", which makes blocks of sums for all threads to read; or lsq's own tiles, with one of
    tiles.INSTRUCTIONS: each thread ends what it has multiplied. Tiles copy as they need it, so that
    both layouts are "as_is".
    """
    a_layout: str = "as_is"
    """"as_is", or copy a first, a block at a time: "padded": as it lies, but with its rows an odd
    number of cache lines apart (a power of two sends all of a column into one set of the cache);
    "mk": the same as [M, K].
    """
    b_layout: str = "as_is"
    """"as_is", or copy b first: "padded", as of a; or so that it lies as [N, K] ("nk") or [K, N]
    ("kn")."""
    rows: int = 0
    """Rows of sums that are made at a time, with tiles by each thread, a multiple of 32; 0: all at
    once, with tiles as many as suit the caches.
    """

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("a_layout", self.a_layout, A_LAYOUTS)
        check_choice("b_layout", self.b_layout, B_LAYOUTS)
        check_whole("rows", self.rows, 0, LARGEST_DIMENSION)
        if not self.tiled:
            return
        if (self.a_layout, self.b_layout) != ("as_is", "as_is"):
            raise ValueError(
                f"kernel is {self.kernel!r}, which copies as it needs it: leave both layouts"
                ' "as_is"'
            )
        if self.rows % tiles.PAIR:
            raise ValueError(
                f"rows is {self.rows}; tiles make multiples of {tiles.PAIR} rows at a time: use one"
            )

    @property
    def tiled(self) -> bool:
        """Whether lsq's own tiles multiply."""
        return self.kernel != ONEDNN

    @classmethod
    def default(cls, key: ProductKey) -> "CpuConfiguration":
        """How a product runs where nothing was tuned: by tiles, unless the C++ library is
        missing."""
        fastest, *_ = (*tiles.usable(), ONEDNN)
        return cls(kernel=fastest, rows=key.request.rows if fastest == ONEDNN else 0)

    def check_key(self, key: ProductKey) -> None:
        """Refuse a product that this configuration cannot run.

        Raises:
            ValueError: it cannot.
        """
        if key.op == MATMUL:
            raise ValueError(
                f"kind is 'cpu', which multiplies for its operations alone, not {key}: tune again"
            )
        if self.a_layout == "mk" and key.layout[0] == "n":
            raise ValueError('a_layout is "mk"; a lies so already: use "as_is" or "padded"')
        if self.b_layout == {"t": "nk", "n": "kn"}[key.layout[1]]:
            raise ValueError(
                f'b_layout is {self.b_layout!r}; b lies so already: use "as_is" or "padded"'
            )

    def __str__(self) -> str:
        unset = "as many rows at a time as suit the caches" if self.tiled else "all rows at once"
        words = [self.kernel, f"{self.rows} rows at a time" if self.rows else unset]
        words += [f"copy a as {self.a_layout}"] if self.a_layout != "as_is" else []
        words += [f"copy b as {self.b_layout}"] if self.b_layout != "as_is" else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class CublasConfiguration:
    """An algorithm of cuBLASLt, whose sums another kernel ends.

    The fields after `workspace_bytes` are what its bytes hold, in cuBLASLt's own numbers.

    Raises:
        ValueError: no such algorithm.
    """

    kind: ClassVar[str] = "cuda"

    algorithm: bytes
    """64 bytes, in files as hexadecimal digits; valid for one version of the library and one model
    of device."""
    workspace_bytes: int
    id: int
    tile: int
    stages: int
    split_k: int
    reduction_scheme: int
    swizzle: int
    custom_option: int
    inner_shape: int
    cluster_shape: int

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, bytes) or len(self.algorithm) != ALGORITHM_BYTES:
            given = (
                f"{len(self.algorithm)} bytes"
                if isinstance(self.algorithm, bytes)
                else repr(self.algorithm)
            )
            raise ValueError(
                f"algorithm is {given}; it must be {ALGORITHM_BYTES} bytes: tune again"
            )
        check_whole("workspace_bytes", self.workspace_bytes, 0, 2**40)
        for name in DECODED:
            check_whole(name, getattr(self, name), -(2**31), 2**32 - 1)

    def check_key(self, key: ProductKey) -> None:
        """Refuse a product that this configuration cannot run.

        Raises:
            ValueError: it cannot.
        """
        if key.op in TILED_ALONE:
            raise ValueError(f"algorithm is of cuBLASLt, which has no part in {key.op}: tune again")
        if key.op == MATMUL and key.dtype == "int8" and key.layout != "nt":
            raise ValueError(
                f'algorithm is of cuBLASLt, which multiplies int8 as "nt", not {key.layout!r}: tune'
                " again"
            )

    def __str__(self) -> str:
        return ", ".join(
            [
                *(f"{name} {getattr(self, name)}" for name in DECODED),
                f"{self.workspace_bytes} bytes",
            ]
        )


DECODED = tuple(field.name for field in dataclasses.fields(CublasConfiguration))[2:]
"""The fields of CublasConfiguration that the algorithm's bytes hold."""


@dataclass(frozen=True, kw_only=True)
class TileConfiguration:
    """A kernel of lsq's own that multiplies codes on a GPU and ends the product: what each of its
    blocks makes.

    Raises:
        ValueError: the kernels have no such tile.
    """

    kind: ClassVar[str] = "cuda"

    rows: int
    """Of sums that a block makes, 64 or 128."""
    columns: int
    """64 or 128; by "wgmma" also 256."""
    stages: int
    """Steps along K that a block holds in shared memory, 2 to 8; by "wgmma" at least 3."""
    split: int = 1
    """Parts along K, each by blocks of its own: of gradients of weights, else 1."""
    instruction: str = "mma"
    """That multiplies: "mma" (mma.sync), or "wgmma", which GPUs of compute capability 9.0 alone
    have."""

    def __post_init__(self) -> None:
        check_choice("instruction", self.instruction, tuple(TILE_COLUMNS))
        for name, allowed in (("rows", TILE_ROWS), ("columns", TILE_COLUMNS[self.instruction])):
            value = getattr(self, name)
            if not isinstance(value, int) or value not in allowed:
                raise ValueError(
                    f"{name} is {shown(value)}; allowed: {', '.join(map(str, allowed))}"
                )
        check_whole("stages", self.stages, *TILE_STAGES[self.instruction])
        check_whole("split", self.split, 1, MOST_SPLIT)

    @property
    def warps(self) -> tuple[int, int]:
        """Of a block, down and across its tile."""
        return (self.rows // 16, 1) if self.instruction == "wgmma" else (2, 2)

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, that a block takes."""
        return self.stages * (self.rows + self.columns) * TILE_STEP

    def blocks(self, m: int, n: int) -> tuple[int, int]:
        """Tiles in the columns and in the rows of a product [M, N]; one row of them where M is
        0."""
        return -(-n // self.columns), max(1, -(-m // self.rows))

    def check_key(self, key: ProductKey) -> None:
        """Refuse a product that this configuration cannot run.

        Raises:
            ValueError: it cannot.
        """
        if key.op not in TILED:
            raise ValueError(
                f"rows is of a tile, which ends products of {', '.join(TILED)}, not {key.op}: tune"
                " again"
            )
        for name in ("n", "k"):
            if getattr(key, name) % 16:
                raise ValueError(
                    f"rows is of a tile, and {name} is {getattr(key, name)}, no multiple of 16:"
                    " tune"
                )
        if self.blocks(key.m, key.n)[1] > MOST_TILE_ROWS:
            raise ValueError(
                f"rows is {self.rows}, of which {key.m} are more than {MOST_TILE_ROWS} tiles: tune"
                " again"
            )
        if self.split > 1 and key.request.tokens != "k":
            raise ValueError(f"split is {self.split}; of {key.op} it is 1")

    def __str__(self) -> str:
        split = f", K in {self.split} parts" if self.split > 1 else ""
        by = " by wgmma" if self.instruction == "wgmma" else ""
        return f"tiles of {self.rows} x {self.columns}{by}, {self.stages} stages{split}"


Configuration = CpuConfiguration | CublasConfiguration | TileConfiguration


@dataclass(frozen=True, kw_only=True)
class Times:
    """Medians, in microseconds.

    Raises:
        ValueError: a time is not above 0.
    """

    chosen: float
    default: float
    """Of what runs where nothing was tuned."""
    float: float
    """Of the same product of floats."""
    other: float | None = None
    """Of the best way of another kind, a tile where cuBLASLt is chosen and the reverse; None where
    none was near."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "other" and value is None:
                continue
            check_number(name, value, LARGEST_TIME)
            if value == 0:
                raise ValueError(f"{name} is 0; a product takes time: measure it again")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The configuration that was found to be the best for a product.

    Raises:
        ValueError: the configuration cannot run the product, or a value is out of range.
    """

    key: ProductKey
    configuration: Configuration
    times: Times
    spread: float
    """Interquartile range of the chosen configuration's times, relative to their median."""
    date: str
    """When it was measured: YYYY-MM-DDThh:mm:ssZ, UTC."""

    def __post_init__(self) -> None:
        if self.key != self.key.rounded():
            raise ValueError(
                f"key is {self.key}; above {EXACT_TOKENS} tokens only multiples of {TOKEN_STEP}"
                " have entries: "
                f"use {self.key.rounded()}"
            )
        try:
            self.configuration.check_key(self.key)
        except ValueError as error:
            raise ValueError(f"configuration.{error}") from None
        check_number("spread", self.spread, LARGEST_SPREAD)
        _check_date(self.date)

    @property
    def gain(self) -> float:
        """How many times as fast as the default."""
        return self.times.default / self.times.chosen


def now() -> str:
    """The date of an entry that is measured now."""
    return datetime.datetime.now(datetime.UTC).strftime(_DATE)


def _check_date(value: object) -> None:
    with contextlib.suppress(ValueError, TypeError):
        if datetime.datetime.strptime(value, _DATE).strftime(_DATE) == value:
            return
    raise ValueError(f"date is {shown(value)}; it must be a time in UTC like 2026-01-31T23:59:59Z")
