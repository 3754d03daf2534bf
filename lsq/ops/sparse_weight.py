"""A 2:4 sparse weight as tensor cores of a GPU take it from memory, word by word, into registers.

P outputs, a multiple of 16; K inputs. A tile has 16 outputs and 64 inputs: 32 lanes with 16 values
each, and 32 bits that say where these stand (csrc/cuda/tensor_core.cuh, multiply_sparse). A lane
reads 16 neighbouring inputs of a row of activations at once; so the groups of four of a tile stand
in another order, 0 4 8 12 1 5 9 13 and so on, which sums do not feel.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Bytes, Codes, Floats, Value, extent

OUTPUTS, INPUTS, GROUPS = 16, 64, 16
"""Of a tile; groups of four inputs of a row in it."""
EMPTY = 0 | 1 << 2
"""The places of a group beyond the last input."""


class SparseWeight(Value):
    """Codes [P, K] of which two of four neighbours are kept, and their scales."""

    values: Codes
    """[P / 16, ceil(K / 64), 32 lanes, 16]"""
    kept: Bytes
    """[P / 16, ceil(K / 64), 32 lanes, 4]"""
    scale: Floats
    """[P]"""
    inner: int
    """K."""

    columns = extent(0, "scale")
    """P."""

    @classmethod
    def of(cls, values: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor) -> SparseWeight:
        """Of what lsq.models.sparsity.Packed holds, int8 [P, K / 2] and uint8 [P, ceil(K / 8)],
        with scale float32 [P].

        Raises:
            ValueError: P is no multiple of 16.
        """
        rows, inner = len(values), 2 * values.shape[1]
        if rows % OUTPUTS:
            raise ValueError(
                f"a sparse weight has {rows} outputs; kernels need a multiple of {OUTPUTS}"
            )
        steps, groups = -(-inner // INPUTS), inner // 4
        places = (
            torch.stack([indices & 15, indices >> 4], dim=2).flatten(1)[:, :groups].to(torch.int64)
        )
        missing = steps * GROUPS - groups
        places = torch.nn.functional.pad(places, (0, missing), value=EMPTY)
        values = torch.nn.functional.pad(values, (0, 2 * missing))
        # [tile, half of its rows, row, step, part, word of b, ...] -> groups in the order of
        # registers
        places = _in_order(places.view(rows // OUTPUTS, 2, 8, steps, 4, 4))
        values = _in_order(values.reshape(rows // OUTPUTS, 2, 8, steps, 4, 4, 2))
        shifts = torch.arange(0, 32, 4, device=places.device)
        # tile, half, row, step, half of the inputs
        words = (places.view(*places.shape[:4], 2, 8) << shifts).sum(5)
        words = words.permute(0, 3, 2, 4, 1).to(torch.uint32).contiguous()
        lanes = values.view(*values.shape[:4], 2, 4, 4).permute(0, 3, 2, 5, 4, 1, 6)
        return cls(
            values=lanes.reshape(-1, steps, 32, 16),
            kept=words.view(torch.uint8).view(-1, steps, 32, 4),
            scale=scale,
            inner=inner,
        )

    def codes(self) -> torch.Tensor:
        """Reference: int8 [P, K]."""
        tiles, steps = self.values.shape[:2]
        # row, part, half of the inputs, of the rows, bytes
        lanes = self.values.view(tiles, steps, 8, 4, 2, 2, 4)
        values = lanes.permute(0, 5, 2, 1, 4, 3, 6).reshape(tiles, 2, 8, steps, GROUPS, 2)
        words = (
            self.kept.view(torch.int32).view(tiles, steps, 8, 2, 2).permute(0, 4, 2, 1, 3).long()
        )
        shifts = torch.arange(0, 32, 4, device=words.device)
        places = (words[..., None] >> shifts & 15).flatten(4)
        places = torch.stack([places & 3, places >> 2], dim=5)
        found = torch.zeros(*places.shape[:5], 4, dtype=torch.int8, device=values.device).scatter_(
            5, places, values
        )
        found = found.view(tiles, 2, 8, steps, 4, 4, 4).transpose(4, 5)
        return found.reshape(tiles * OUTPUTS, steps * INPUTS)[:, : self.inner]


def _in_order(groups: torch.Tensor) -> torch.Tensor:
    """[tile, half, row, step, 4, 4, ...] -> [tile, half, row, step, 16 groups in another order
    ...]."""
    turned = groups.transpose(4, 5).contiguous()
    return turned.view(*turned.shape[:4], -1)
