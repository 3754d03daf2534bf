"""Sparse matrices as they are stored: the values that are kept, and where in their group of four
they stand.

Indices lie as sparse products of NVIDIA's mma.sp take them: 2 bits each, the smaller of a group
first, from the lowest bits of a byte on. Shapes: M rows of an activation, N rows and K columns of a
weight.
"""

from dataclasses import dataclass

import torch

from lsq.models.sparsity.pattern import choose
from lsq.quant.pruning import GROUP, KEPT

ROOM = 2**24
"""Inputs that `product` gathers at once, of all rows of x for some rows of the weight."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A matrix [N, K] of which each group of four in a row holds two values at most. int8 codes
    take 5/8 of a byte."""

    values: torch.Tensor
    """[N, K / 2], any dtype: two of each group in their order, zeros where a group has fewer."""
    indices: torch.Tensor
    """uint8 [N, ceil(K / 8)]: those of two groups in a byte, of the first one in the lower half."""

    def columns(self) -> torch.Tensor:
        """int64 [N, K / 2]: the column of each value."""
        groups = self.values.shape[1] // KEPT
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.indices.device)
        places = (self.indices[:, :, None] >> shifts & 3).flatten(1)[:, : groups * KEPT]
        return places + torch.arange(groups, device=places.device).repeat_interleave(KEPT) * GROUP


def pack(matrix: torch.Tensor) -> Packed:
    """Store a matrix [N, K] of any dtype that is sparse already; `unpack` gives the same back.

    Raises:
        ValueError: K is no multiple of 4, or a group holds more than two values other than 0.
    """
    mask = choose(matrix.double().abs())  # int8 has no 128
    left = ((matrix != 0) & ~mask).nonzero()
    if len(left):
        row, column = left[0].tolist()
        first = column - column % GROUP
        raise ValueError(
            f"row {row} holds {matrix[row, first : first + GROUP].tolist()} in columns {first} to"
            f" {first + 3}; 2:4 "
            "sparsity stores two of four: multiply the matrix by a mask of"
            " lsq.models.sparsity.choose"
            " first"
        )
    rows, columns = matrix.shape
    places = mask.view(-1, GROUP).nonzero()[:, 1].to(torch.uint8).view(rows, columns // GROUP, KEPT)
    halves = places[:, :, 0] | places[:, :, 1] << 2
    low, high = (
        torch.nn.functional.pad(halves, (0, halves.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(2)
    )
    return Packed(values=matrix[mask].view(rows, columns // GROUP * KEPT), indices=low | high << 4)


def unpack(packed: Packed) -> torch.Tensor:
    """The matrix [N, K] again."""
    rows, kept = packed.values.shape
    return packed.values.new_zeros(rows, kept // KEPT * GROUP).scatter_(
        1, packed.columns(), packed.values
    )


def product(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Reference of the sparse product: int8 x [M, K] times the transpose of int8 weight [N, K] ->
    int32 [M, N].

    Each sum is of K / 2 products: those of the inputs that the indices name.

    Raises:
        ValueError: x has another dtype or width.
    """
    columns = weight.values.shape[1] // KEPT * GROUP
    if (
        x.dtype != torch.int8
        or weight.values.dtype != torch.int8
        or x.dim() != 2
        or x.shape[1] != columns
    ):
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} and the weight {weight.values.dtype} of {columns}"
            " columns; the sparse "
            f"product is of int8, x must be [M, {columns}]"
        )
    several = max(1, ROOM // max(1, len(x) * weight.values.shape[1]))
    parts = zip(weight.columns().split(several), weight.values.int().split(several), strict=True)
    sums = [torch.einsum("mnk,nk->mn", x.int()[:, places], values) for places, values in parts]
    return torch.cat(sums, dim=1) if sums else x.new_zeros((len(x), 0), dtype=torch.int32)
