"""A product with a 2:4 sparse weight and its epilogue, without a backward pass: few rows on CUDA.

    y = x weight^T + bias;   result = activation(y), as floats or rounded once to codes

M rows, K inputs, P outputs.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native.launch import check
from lsq.ops.nonlinearity import Nonlinearity, epilogue
from lsq.program.declare import Activations, Bytes, Codes, Floats, In, Out, Value, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, Rows

OUTPUTS, INPUTS, GROUPS = 16, 64, 16  # Size of a tile; groups of four inputs in its rows.
EMPTY = 0 | 1 << 2  # Indices of a group beyond the last input.


class SparseWeight(Value):
    """Codes [P, K] with two kept of four neighbours, and their scales."""

    values: Codes  # [P / 16, ceil(K / 64), 32 lanes, 16]
    kept: Bytes  # [P / 16, ceil(K / 64), 32 lanes, 4]
    scale: Floats  # [P]
    inner: int  # K.

    columns = extent(0, "scale")  # P.

    @classmethod
    def of(cls, values: torch.Tensor, indices: torch.Tensor, scale: torch.Tensor) -> SparseWeight:
        """Arrange a sparsity.Packed, int8 [P, K / 2] and uint8 [P, ceil(K / 8)]; scale float32 [P].

        Raises:
            ValueError: P is no multiple of 16.
        """
        rows, inner = len(values), 2 * values.shape[1]
        if rows % OUTPUTS:
            raise ValueError(
                f"a sparse weight has {rows} outputs; kernels need a multiple of {OUTPUTS}"
            )
        steps, groups = -(-inner // INPUTS), inner // 4
        indices = torch.stack([indices & 15, indices >> 4], dim=2).flatten(1)
        indices = indices[:, :groups].to(torch.int64)
        missing = steps * GROUPS - groups
        indices = torch.nn.functional.pad(indices, (0, missing), value=EMPTY)
        values = torch.nn.functional.pad(values, (0, 2 * missing))
        # [tile, half of its rows, row, step, part, word of b, ...] -> groups as registers
        # hold them
        indices = _in_order(indices.view(rows // OUTPUTS, 2, 8, steps, 4, 4))
        values = _in_order(values.reshape(rows // OUTPUTS, 2, 8, steps, 4, 4, 2))
        shifts = torch.arange(0, 32, 4, device=indices.device)
        # tile, half, row, step, half of the inputs
        words = (indices.view(*indices.shape[:4], 2, 8) << shifts).sum(5)
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
        words = self.kept.view(torch.int32).view(tiles, steps, 8, 2, 2)
        words = words.permute(0, 4, 2, 1, 3).long()
        shifts = torch.arange(0, 32, 4, device=words.device)
        indices = (words[..., None] >> shifts & 15).flatten(4)
        indices = torch.stack([indices & 3, indices >> 2], dim=5)
        found = values.new_zeros(*indices.shape[:5], 4).scatter_(5, indices, values)
        found = found.view(tiles, 2, 8, steps, 4, 4, 4).transpose(4, 5)
        return found.reshape(tiles * OUTPUTS, steps * INPUTS)[:, : self.inner]


def _in_order(groups: torch.Tensor) -> torch.Tensor:
    """Reorder [tile, half, row, step, 4, 4, ...] as [tile, half, row, step, 16 groups ...]."""
    in_order = groups.transpose(4, 5).contiguous()
    return in_order.view(*in_order.shape[:4], -1)


MOST_ROWS = 128  # Most rows in decoding: every 32 rows read the weight again.


class SparseProject(Operation):
    """The product activation(x weight^T + bias) [M, P] of codes, with the fields of Project."""

    x: In[Rows]  # [M, K], codes.
    weight: In[SparseWeight]  # [P, K]
    bias: In[Floats] | None  # [P]
    out: Out[Activations] | None  # [M, P]
    rounded: Out[Coded] | None  # [M, P], without `clipped` and `error`.
    nonlinearity: Out[Nonlinearity] | None  # An activation alone.

    rows = extent(0, "x.tensor")
    columns = extent(0, "weight.scale")  # P.

    def reference(self):
        sums = gemm.reference(self.x.tensor, self.weight.codes()).float()
        y = sums * (self.x.scale * self.weight.scale)
        return epilogue(y if self.bias is None else y + self.bias, self.nonlinearity, self.rounded)

    def cpu_scratch(self):
        check(
            False,
            "SparseProject runs on CUDA; on the CPU take PackedProject with PackedWeight.of_sparse",
        )
