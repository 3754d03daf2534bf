"""Products of floats on the CPU and in references, in other dtypes than that of their operands.

M rows, N columns, K: the inner dimension.
"""

from collections.abc import Sequence

import torch

from lsq.program.operation import Spec


def float_product(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """Reference: a float32 [M, K] times b float32 [K, N], in `dtype`; float32 [M, N]."""
    narrow = getattr(torch, dtype)
    return (a.to(narrow) @ b.to(narrow)).to(torch.float32)


def narrow_scratch(a: Sequence[int], out: Sequence[int], dtype: str) -> list[Spec]:
    """Scratch memory of `float_product_into` in `dtype`, for `a` and the result of those shapes."""
    return (
        [] if dtype == "float32" else [(tuple(shape), getattr(torch, dtype)) for shape in (a, out)]
    )


def float_product_into(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, narrow: Sequence[torch.Tensor]
) -> None:
    """out float32 [M, N] = a float32 [M, K] times b [K, N], on the CPU, in b's dtype in the tensors
    `narrow`."""
    if not narrow:
        torch.mm(a, b, out=out)
        return
    a_narrow, product = narrow
    a_narrow.copy_(a)
    torch.mm(a_narrow, b, out=product)
    out.copy_(product)
