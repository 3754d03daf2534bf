"""Whether a product of bit tensors is made from planes of bits or from bytes: equal sums, in
different times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lsq.native import loader, tiles
from lsq.native.processor import cpu_features
from lsq.quant.stored import BYTES_SUMMED

if TYPE_CHECKING:
    from lsq.bits.bit_tensor import BitTensor

EMULATED_SM = 100
"""10 times the compute capability from which GPUs have no product of bits (Blackwell)."""
MOST_ON_GPU = 4
"""Products of bits that take as long as one of int8 on sm_80 to sm_90: counted by instructions, not
measured."""
COLUMNS_OF_A_ROW = 80
"""Columns, of 1 bit each, that planes multiply while a row is unpacked to bytes. Like the numbers
of `on_cpu`: measured by benchmarks/bench_bits.py on a Xeon with AMX."""
WITHOUT_POPCOUNTS = 2.6
"""Times as long as products of bits take without VPOPCNTDQ, where bytes have VNNI."""


@dataclass(frozen=True)
class Plan:
    """How a product is made."""

    way: str  # "planes" or "bytes".
    reason: str


def planned(a: BitTensor, b: BitTensor) -> Plan:
    """Return how a @ b is made, and why. Raises ValueError as a @ b does."""
    a.check_product(b)
    if a.shape[1] > BYTES_SUMMED:
        return Plan("planes", f"bytes are summed over at most {BYTES_SUMMED:,} inputs")
    share = 1 - a.jumped / a.tile_count
    if a.planes.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(a.planes.device)
        return on_gpu(10 * major + minor, b.bits, a.bits, share)
    rows, columns = a.shape[0], b.shape[1]
    return on_cpu(b.bits, a.bits, rows, columns, share, popcounts=counts_bits())


def counts_bits() -> bool:
    """Return whether this processor counts bits in vectors (VPOPCNTDQ)."""
    return "avx512_vpopcntdq" in cpu_features()


def on_gpu(sm: int, w: int, a: int, share: float) -> Plan:
    """Plan a product on a GPU of compute capability sm / 10; see `on_cpu`."""
    if sm >= EMULATED_SM:
        return Plan("bytes", f"sm_{sm} has no product of bits; compilers make int8 products of it")
    return _compared(w * a * share, MOST_ON_GPU, "by count, not measured")


def on_cpu(
    w: int,
    a: int,
    rows: int,
    columns: int,
    share: float,
    instructions: str | None = None,
    popcounts: bool = True,
) -> Plan:
    """Plan a product of so many rows of `a` bits with columns of `w` bits.

    Args:
        share: of the tiles of `a` that are not zero.
        instructions: that multiply bytes (lsq.native.tiles); None: the fastest.
        popcounts: whether the processor counts bits in vectors (VPOPCNTDQ).
    """
    if not loader.available():
        return Plan("planes", "there is no C++ library, which packs bytes")
    instructions = instructions or tiles.fastest()
    work = w * a * share
    if not popcounts and instructions != tiles.PLAIN:
        work *= WITHOUT_POPCOUNTS
    if rows == 1:
        most = max(4.0, w) if w != 3 else 6.0 if instructions == "amx" else 9.0
    else:
        most = min(4.5, 2.9 + 12 / rows) if w == 1 else 3.0
        if instructions == "amx":
            most = min(most, 0.62 + 19 / rows)
        most += COLUMNS_OF_A_ROW / columns
    return _compared(work, most, f"measured for {rows} rows beside {instructions}")


def _compared(work: float, most: float, how: str) -> Plan:
    reason = f"{work:.3g} products of bits for one of bytes; up to {most:.3g} pay off ({how})"
    return Plan("planes" if work <= most else "bytes", reason)
