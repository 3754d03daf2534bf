"""The scratch memory with which the CPU runs a product: one stretch of bytes, cut into aligned tensors.

Sizes follow from the key and the configuration alone, and none falls when a dimension grows.
"""

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

    @property
    def bytes(self) -> int:
        """Its size, up to where the next part may begin."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def block_rows(key: ProductKey, configuration: CpuConfiguration) -> int:
    """The most rows of a that are multiplied at a time, with their padding."""
    rows = min(key.m, configuration.rows or key.m)
    padded = configuration.padded_rows
    return -(-rows // padded) * padded if padded else rows


def parts(key: ProductKey, configuration: CpuConfiguration) -> dict[str, Part]:
    """What running a product needs.

    Returns:
        some of "a" [block rows, K] and "b" [N, K] or [K, N]: copies, int8 or float32; "product" float32
        [block rows, N]; "sums" int32 [block rows, N], unless they are the operation's output.
    """
    rows = block_rows(key, configuration)
    floats = configuration.path == "float32"
    codes = torch.float32 if floats else torch.int8
    found = {}
    if floats or configuration.a_layout != "as_is" or configuration.padded_rows:
        found["a"] = Part((rows, key.k), codes)
    if floats or configuration.b_layout != "as_is":
        as_kn = configuration.b_layout == "kn" or (configuration.b_layout == "as_is" and key.layout[1] == "n")
        found["b"] = Part((key.k, key.n) if as_kn else (key.n, key.k), codes)
    if floats:
        found["product"] = Part((rows, key.n), torch.float32)
    if configuration.padded_rows or not OPERATIONS[key.op].in_place:
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
        used = math.prod(part.shape) * part.dtype.itemsize
        found[name] = memory[first : first + used].view(part.dtype).view(part.shape)
        first += part.bytes
    return found
