"""The ways in which the CPU can run an int8 product, and their operands and clocks for the tuner.

lsq's own tiles are tried with fewer and with more rows at a time, and oneDNN. Of oneDNN was found
on an AMD EPYC with AVX-512 VNNI (Zen 5, oneDNN 3.12) and the shapes of transformer base and big:
rows a power of two bytes apart cost a fifth of large weight gradients (2,048 or 4,096 outputs), and
up to two thirds of a product of few rows with K = 4,096, which a padded copy saves. Otherwise all
layouts are within a tenth of each other. Padding the number of rows never
helped, and floats never, so that neither is a candidate: bfloat16 takes twice as long and rounds
its result; float32 takes 8 times as long, and its sums are exact for inner dimensions up to 1,040
alone.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.cpu_product import (
    carve,
    configured_blocks,
    fresh_scratch,
    scratch_bytes,
    tile_product,
)
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuner.operands import LARGEST, RowChecksums, laid, whole_numbers
from lsq.native import loader, tiles
from lsq.ops.readers import reader_of

BLOCK_ROWS = (64, 128, 256, 512, 1024, 2048)
"""Rows of sums at a time that are tried."""
STRIPS = (32, 64, 128, 256, 512)
"""The same for tiles, of each thread."""
MOST_SCRATCH = 64 * 2**20
"""Bytes of scratch memory that a configuration may take, if the default takes less."""
ASSUMED_CACHE = 32 * 2**20
MOST_SETS = 512
MOST_BYTES = 2**31
"""Of operands; a single set may be larger."""


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the largest cache that a core sees; an assumption where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    texts = (path.read_text().strip() for path in folder.glob("index*/size"))
    matches = (re.fullmatch(r"(\d+)([KMG])", text) for text in texts)
    return max(
        (int(found[1]) * units[found[2]] for found in matches if found), default=ASSUMED_CACHE
    )


def candidates(key: ProductKey) -> list[CpuConfiguration]:
    """Configurations of an int8 product, what runs untuned first.

    Raises:
        ValueError: the CPU has no choice with such a product.
    """
    default = CpuConfiguration.default(key)
    default.check_key(key)
    most = max(scratch_bytes(key, default), MOST_SCRATCH)
    others = [
        each
        for each in (*_tiled(key), *_by_onednn(key))
        if each != default and scratch_bytes(key, each) <= most
    ]
    return [default, *others]


def _tiled(key: ProductKey) -> list[CpuConfiguration]:
    """By each kind of instructions, with fewer and with more rows at a time."""
    return [
        CpuConfiguration(kernel=kernel, rows=each)
        for kernel in tiles.preferred()
        for each in (0, *STRIPS)
        if each < key.m
    ]


def _by_onednn(key: ProductKey) -> list[CpuConfiguration]:
    usual = key.request.rows if key.request.rows < key.m else 0
    a_layouts = ("as_is", "padded", *(["mk"] if key.layout[0] == "t" else []))
    b_layouts = ("as_is", "padded", "kn" if key.layout[1] == "t" else "nk")
    ways = [(usual, a_layout, b_layout) for a_layout in a_layouts for b_layout in b_layouts]
    for rows in (0, *(rows for rows in BLOCK_ROWS if rows < key.m)):
        ways += [
            (rows, *layouts)
            for layouts in (("as_is", "as_is"), ("padded", "as_is"), ("as_is", "padded"))
        ]
    return [
        CpuConfiguration(rows=rows, a_layout=a_layout, b_layout=b_layout)
        for rows, a_layout, b_layout in dict.fromkeys(ways)
    ]


class CpuTrial:
    """One product on the CPU, with what reads its sums.

    An operation reads its sums at once, block by block, so that the best number of rows depends on
    the caches that both share. Here the end of Project stands for all readers but those of a
    vocabulary.

    Args:
        key: the product, which runs on as many threads as torch has.
        cache: bytes that its operands exceed together; None: those of the largest cache.
    """

    def __init__(self, key: ProductKey, cache: int | None = None) -> None:
        cache = last_level_cache() if cache is None else cache
        self.key, self._cache = key, cache
        generator = torch.Generator().manual_seed(0)
        a, b = (
            laid(whole_numbers(key, name, LARGEST, generator), key, name) for name in ("a", "b")
        )
        a, b = a.t() if key.layout[0] == "t" else a, b if key.layout[1] == "t" else b.t()
        result = torch.zeros(key.m, key.n, dtype=torch.int8)
        self._sets = _copies((a, b, result), cache)
        self._checksums = RowChecksums(a, b)
        self._memory = torch.zeros(0, dtype=torch.int8)
        self._readers = [reader_of(key, *each) for each in self._sets]
        self._floats: list[tuple[torch.Tensor, ...]] = []
        self._next = 0

    def candidates(self) -> Sequence[CpuConfiguration]:
        return candidates(self.key)

    def fault(self, configuration: CpuConfiguration) -> str | None:
        a, b, _ = self._sets[0]
        for first, sums in configured_blocks(
            a, b, configuration, fresh_scratch(self.key, configuration)
        ):
            wrong = self._checksums.first_wrong_row(sums, first)
            if wrong is not None:
                return f"row {wrong} of the result is wrong"
        return None

    def seconds(self, configuration: CpuConfiguration, repeats: int) -> float:
        memory, reads = self._scratch(configuration), loader.available()
        start = time.perf_counter()
        for _ in range(repeats):
            number, self._next = self._next, (self._next + 1) % len(self._sets)
            a, b, _ = self._sets[number]
            reader = self._readers[number]
            if configuration.tiled:
                reader.multiply(tile_product(a, b, configuration, memory.get("packed")))
                continue
            for first, sums in configured_blocks(a, b, configuration, memory):
                if reads:
                    reader.end(sums, first)
        return (time.perf_counter() - start) / repeats

    def float_seconds(self, repeats: int) -> float:
        """Of torch.mm in float32."""
        if not self._floats:
            a, b, _ = self._sets[0]
            self._floats = _copies(
                (a.float(), b.float(), torch.empty(self.key.m, self.key.n)), self._cache
            )
        start = time.perf_counter()
        for number in range(repeats):
            a, b, out = self._floats[number % len(self._floats)]
            torch.mm(a, b.t(), out=out)
        return (time.perf_counter() - start) / repeats

    def close(self) -> None:
        """Nothing: memory goes with the object."""

    def _scratch(self, configuration: CpuConfiguration) -> dict[str, torch.Tensor]:
        """Scratch memory is the same for all: touched before it is timed, and warm, as planned
        memory is."""
        needed = scratch_bytes(self.key, configuration)
        if len(self._memory) < needed:
            self._memory = torch.zeros(needed, dtype=torch.int8)
        return carve(self._memory, self.key, configuration)


def _copies(tensors: tuple[torch.Tensor, ...], cache: int) -> list[tuple[torch.Tensor, ...]]:
    """The tensors and copies of them, lying alike, so many that all together are twice as large as
    the cache."""
    size = sum(tensor.nbytes for tensor in tensors)
    count = max(1, min(-(-2 * cache // size) + 1, MOST_SETS, MOST_BYTES // size))
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(count - 1))]
