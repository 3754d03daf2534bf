"""A weight whose codes the CPU has packed once, for products with few rows: those are bound by reading it.

P outputs, K inputs. Tiles are those of csrc/cpu/tiles.h: 16 outputs by 64 inputs, four of which lie together.
"""

from __future__ import annotations

import torch

from lsq.csrc import loader, tiles
from lsq.program.declare import Bytes, Floats, Value, extent

SIDE = 16
"""Outputs of a tile."""
ALIGNMENT = 64
"""Bytes to whose multiple tiles begin."""


class PackedWeight(Value):
    """Codes [P, K] as tiles, and their scales."""

    tiles: Bytes
    """[tiles.packed_bytes(P, K)], aligned to 64 bytes."""
    scale: Floats
    """[P]"""
    inner: int
    """K."""
    instructions: int
    """What multiplies; see csrc/tiles.py."""

    columns = extent(0, "scale")
    """P."""

    @classmethod
    def of(cls, codes: torch.Tensor, scale: torch.Tensor, instructions: str | None = None) -> PackedWeight:
        """Pack codes int8 [P, K] with scale float32 [P], for the fastest instructions or those of that name.

        Raises:
            ValueError: the processor has no such instructions, or the C++ library is missing.
        """
        if not tiles.usable():
            raise ValueError("packed weights need the C++ host library; install g++ and reinstall lsq")
        chosen = instructions or tiles.usable()[0]
        count = tiles.packed_bytes(*codes.shape)
        memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device="cpu")
        memory = memory[-memory.data_ptr() % ALIGNMENT :][:count]
        loader.call("lsq_pack_columns", tiles.TileProduct.of(codes[:1], codes, chosen, 0, memory))
        return cls(tiles=memory, scale=scale, inner=codes.shape[1], instructions=tiles.INSTRUCTIONS[chosen])

    def codes(self) -> torch.Tensor:
        """Reference: int8 [P, K]."""
        columns, inner = -(-self.columns // tiles.PAIR) * tiles.PAIR, -(-self.inner // tiles.INNER) * tiles.INNER
        whole = self.tiles[: columns * inner].view(torch.int8).view(columns // SIDE, -1, SIDE, SIDE, 4)
        return whole.permute(0, 3, 1, 2, 4).reshape(columns, inner)[: self.columns, : self.inner]
