"""The scratch memory with which the CPU runs a product: one stretch of bytes, cut into aligned tensors.

Sizes follow from the key and the configuration alone, and none falls when a dimension grows.
"""

import functools
import math
from typing import NamedTuple

import torch

from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.product_key import OPERATIONS, ProductKey

ALIGNMENT = 64


class Part(NamedTuple):
    """One tensor of scratch memory."""

    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False
    """It lies as [columns, rows]."""

    @property
    def lies(self) -> tuple[int, int]:
        """Rows and their distance as they lie: of codes an odd number of cache lines, of everything else packed."""
        rows, columns = reversed(self.shape) if self.transposed else self.shape
        return rows, (-(-columns // ALIGNMENT) | 1) * ALIGNMENT if self.dtype == torch.int8 else columns

    @property
    def bytes(self) -> int:
        """Its size, up to where the next part may begin."""
        return -(-math.prod(self.lies) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor at the beginning of `memory`, one-dimensional, int8 or uint8."""
        rows, distance = self.lies
        lying = memory[: rows * distance * self.dtype.itemsize].view(self.dtype).view(rows, distance)
        return lying.t()[: self.shape[0]] if self.transposed else lying[:, : self.shape[1]]


def block_rows(key: ProductKey, configuration: CpuConfiguration) -> int:
    """The most rows of a that are multiplied at a time."""
    return min(key.m, configuration.rows or key.m)


@functools.lru_cache(maxsize=4096)
def parts(key: ProductKey, configuration: CpuConfiguration) -> dict[str, Part]:
    """What running a product needs.

    Returns:
        some of "a" [block rows, K] and "b" [N, K]: copies, int8 or float32; "product" float32 [block rows, N]; "sums"
        int32 [block rows, N], unless they are the operation's output. Not to be changed: it is kept.
    """
    rows = block_rows(key, configuration)
    floats = configuration.path == "float32"
    codes = torch.float32 if floats else torch.int8
    found = {}
    if floats or configuration.a_layout != "as_is":
        found["a"] = Part((rows, key.k), codes, key.layout[0] == "t" and configuration.a_layout != "mk")
    if floats or configuration.b_layout != "as_is":
        along_n = {"nk": False, "kn": True}.get(configuration.b_layout, key.layout[1] == "n")
        found["b"] = Part((key.n, key.k), codes, along_n)
    if floats:
        found["product"] = Part((rows, key.n), torch.float32)
    if not OPERATIONS[key.op].in_place:
        found["sums"] = Part((rows, key.n), torch.int32)
    return found


def size(key: ProductKey, configuration: CpuConfiguration) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts(key, configuration).values())


def carve(memory: torch.Tensor, key: ProductKey, configuration: CpuConfiguration) -> dict[str, torch.Tensor]:
    """The parts as views of `memory`, one-dimensional int8 or uint8 at a multiple of ALIGNMENT bytes.

    Raises:
        ValueError: the memory is too small.
    """
    needed = size(key, configuration)
    if memory.numel() < needed:
        raise ValueError(
            f"{key} needs {needed} bytes of scratch memory as it is configured ({configuration}), and has "
            f"{memory.numel()}; choose the files of tuned products before memory is planned"
        )
    found, first = {}, 0
    for name, part in parts(key, configuration).items():
        found[name] = part.view(memory[first:])
        first += part.bytes
    return found
