"""Products of each kind, as the operations between them read them."""

import torch

from lsq.quant import pack_bits

KINDS = ("int8", "int32", "float32")
ROWS = (1, 7, 41, 341)
DTYPES = (torch.float32, torch.bfloat16)


def product_of(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [M, N], scale) of about unit magnitude: codes with scale [1], sums with scale [N], or
    floats alone."""
    if kind == "int8":
        return torch.randint(-127, 128, (rows, columns), dtype=torch.int8), torch.tensor([0.015])
    if kind == "int32":
        return torch.randint(-(10**6), 10**6, (rows, columns), dtype=torch.int32), 1e-6 * (
            1 + torch.rand(columns)
        )
    return torch.randn(rows, columns), None


def clipped_bits(codes: torch.Tensor, share: float = 0.1) -> torch.Tensor:
    """Packed bits uint8 [ceil(numel / 8)], of which about `share` are set, where codes are not
    0."""
    return pack_bits((torch.rand(codes.shape) < share) & (codes != 0))


def product_in(
    dtype: torch.dtype, kind: str, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, with floats in `dtype`."""
    values, scale = product_of(kind, rows, columns)
    return (values.to(dtype) if values.is_floating_point() else values), scale
