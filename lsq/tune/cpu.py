"""The ways in which the CPU can run an int8 product, and their operands and clocks for the tuner.

What was found on an AMD EPYC with AVX-512 VNNI (Zen 5, oneDNN 3.12) and the shapes of transformer base and big: rows a
power of two bytes apart cost a fifth of large weight gradients (2,048 or 4,096 outputs), and up to two thirds of a
product of few rows with K = 4,096, which a padded copy saves. Otherwise all layouts are within a tenth of each other.
Padding the number of rows never helped, and floats never: bfloat16 takes twice as long and float32 8 times. A product
of bfloat16 rounds its result to bfloat16, so it is no candidate at all.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lsq.csrc import loader
from lsq.gemm import scratch
from lsq.gemm.configuration import LARGEST_FLOAT_INNER, CpuConfiguration
from lsq.gemm.cpu_product import configured_blocks, multiply
from lsq.gemm.product_key import OPERATIONS, ProductKey
from lsq.tune.checksum import RowChecksums

BLOCK_ROWS = (64, 128, 256, 512, 1024, 2048)
"""Rows of sums at a time that are tried."""
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
    return max((int(found[1]) * units[found[2]] for found in matches if found), default=ASSUMED_CACHE)


def candidates(key: ProductKey) -> list[CpuConfiguration]:
    """Configurations of an int8 product, what runs untuned first.

    Raises:
        ValueError: the CPU has no choice with such a product.
    """
    if key.dtype != "int8":
        raise ValueError(f"{key}: the CPU's products of floats have no variants; tune int8, or --device cuda")
    default = CpuConfiguration.default(key.op)
    usual = default.rows if default.rows < key.m else 0
    a_layouts = ("as_is", "padded", *(["mk"] if key.layout[0] == "t" else []))
    b_layouts = ("as_is", "padded", "kn" if key.layout[1] == "t" else "nk")
    ways = [(usual, a_layout, b_layout) for a_layout in a_layouts for b_layout in b_layouts]
    for rows in (0, *(rows for rows in BLOCK_ROWS if rows < key.m)):
        ways += [(rows, *layouts) for layouts in (("as_is", "as_is"), ("padded", "as_is"), ("as_is", "padded"))]
    ways = dict.fromkeys(ways)
    del ways[usual, "as_is", "as_is"]
    found = [CpuConfiguration(rows=rows, a_layout=a_layout, b_layout=b_layout) for rows, a_layout, b_layout in ways]
    if key.k <= LARGEST_FLOAT_INNER:
        found.append(CpuConfiguration(rows=usual, path="float32"))
    most = max(scratch.size(key, default), MOST_SCRATCH)
    return [default, *(each for each in found if scratch.size(key, each) <= most)]


class CpuBackend:
    """The products of this CPU, by as many threads as torch has.

    Args:
        cache: bytes that the operands of a product exceed together.
    """

    def __init__(self, cache: int | None = None) -> None:
        self.cache = last_level_cache() if cache is None else cache

    def candidates(self, key: ProductKey) -> Sequence[CpuConfiguration]:
        return candidates(key)

    def trial(self, key: ProductKey) -> "CpuTrial":
        return CpuTrial(key, self.cache)


class CpuTrial:
    """One product on the CPU, with what reads its sums.

    An operation that is not in place reads its sums at once, block by block, so that the best number of rows depends on
    the caches that both share. Here lsq_round_sums, the reader of linear_int8, stands for all readers.
    """

    def __init__(self, key: ProductKey, cache: int) -> None:
        self.key = key
        self._reads = not OPERATIONS[key.op].in_place and loader.available()
        generator = torch.Generator().manual_seed(0)
        a, b = (_codes(shape, generator) for shape in self._shapes())
        self._sets = [(a, b, self._result())]
        self._sets += [(a.clone(), b.clone(), self._result()) for _ in range(_sets(self._set_bytes(1), cache) - 1)]
        self._checksums = RowChecksums(*self._operands(a, b))
        self._memory = torch.zeros(0, dtype=torch.int8)
        self._alpha = torch.full((key.n,), 1e-3)
        self._scale = torch.ones(1)
        self._clipped = torch.empty(-(-key.m * key.n // 8), dtype=torch.uint8)
        self._floats: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._cache = cache
        self._next = 0

    def fault(self, configuration: CpuConfiguration) -> str | None:
        a, b, result = self._sets[0]
        a, b = self._operands(a, b)
        if OPERATIONS[self.key.op].in_place:
            multiply(a, b, result, configuration, self._scratch(configuration))
            blocks = [(0, result)]
        else:
            blocks = configured_blocks(a, b, configuration, self._scratch(configuration))
        for first, sums in blocks:
            wrong = self._checksums.first_wrong_row(sums, first)
            if wrong is not None:
                return f"row {wrong} of the result is wrong"
        return None

    def seconds(self, configuration: CpuConfiguration, repeats: int) -> float:
        memory = self._scratch(configuration)
        start = time.perf_counter()
        for _ in range(repeats):
            a, b, result = self._sets[self._next]
            self._next = (self._next + 1) % len(self._sets)
            self._run(*self._operands(a, b), result, configuration, memory)
        return (time.perf_counter() - start) / repeats

    def float_seconds(self, repeats: int) -> float:
        """Of torch.mm in float32."""
        if not self._floats:
            a, b, _ = self._sets[0]
            a, b = a.float(), b.float()
            out = torch.empty(self.key.m, self.key.n)
            self._floats = [(a, b, out)]
            more = range(_sets(self._set_bytes(4), self._cache) - 1)
            self._floats += [(a.clone(), b.clone(), torch.empty_like(out)) for _ in more]
        start = time.perf_counter()
        for number in range(repeats):
            a, b, out = self._floats[number % len(self._floats)]
            a, b = self._operands(a, b)
            torch.mm(a, b.t(), out=out)
        return (time.perf_counter() - start) / repeats

    def close(self) -> None:
        """Nothing: memory goes with the object."""

    def _run(self, a, b, result, configuration, memory) -> None:
        if OPERATIONS[self.key.op].in_place:
            multiply(a, b, result, configuration, memory)
            return
        for first, sums in configured_blocks(a, b, configuration, memory):
            if self._reads:
                loader.call(
                    "lsq_round_sums", sums, self._alpha, result, self._scale, self._clipped, None, first,
                    sums.shape[0], sums.shape[1], 127,
                )

    def _scratch(self, configuration: CpuConfiguration) -> dict[str, torch.Tensor]:
        """Scratch memory is the same for all: touched before it is timed, and warm, as planned memory is."""
        needed = scratch.size(self.key, configuration)
        if len(self._memory) < needed:
            self._memory = torch.zeros(needed, dtype=torch.int8)
        return scratch.carve(self._memory, self.key, configuration)

    def _shapes(self) -> list[tuple[int, int]]:
        """a and b as they lie."""
        key = self.key
        a = (key.k, key.m) if key.layout[0] == "t" else (key.m, key.k)
        b = (key.n, key.k) if key.layout[1] == "t" else (key.k, key.n)
        return [a, b]

    def _operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a [M, K] and b [N, K] of what lies."""
        return a.t() if self.key.layout[0] == "t" else a, b if self.key.layout[1] == "t" else b.t()

    def _result(self) -> torch.Tensor:
        """The sums where they are the result, else the codes."""
        dtype = torch.int32 if OPERATIONS[self.key.op].in_place else torch.int8
        return torch.zeros(self.key.m, self.key.n, dtype=dtype)

    def _set_bytes(self, width: int) -> int:
        key = self.key
        result = 4 if OPERATIONS[key.op].in_place or width == 4 else 1
        return width * (key.m * key.k + key.n * key.k) + result * key.m * key.n


def _codes(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Codes of all values, the largest ones in the first row and column: sums where narrow instructions saturate."""
    made = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    made[0], made[:, 0] = 127, -127
    return made


def _sets(size: int, cache: int) -> int:
    """How many sets of operands of `size` bytes are twice as large as the cache."""
    return max(1, min(-(-2 * cache // size) + 1, MOST_SETS, MOST_BYTES // size))
