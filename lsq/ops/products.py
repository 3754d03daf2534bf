"""Matrix products that operations are made of, and their operands in other dtypes.

M rows, N columns, K: the inner dimension.
"""

from collections.abc import Iterator, Sequence

import torch

from lsq import gemm
from lsq.native.launch import Launch, Product
from lsq.ops.kernels import add_sums, check_columns, float_operand
from lsq.program.operation import Spec


def float_product(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """Reference: a float32 [M, K] times b float32 [K, N], in `dtype`; float32 [M, N]."""
    narrow = getattr(torch, dtype)
    return (a.to(narrow) @ b.to(narrow)).to(torch.float32)


def narrow_scratch(a: Sequence[int], out: Sequence[int], dtype: str) -> list[Spec]:
    """What `float_product_into` needs for a product in `dtype`: shapes of `a` and of the result."""
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


SUMS = {torch.int32: 1, torch.float32: 2}
"""-DSUMS of kernels that end a product of codes, by the dtype of its sums; 0: of floats."""


def sums_scratch(rows: int, columns: int, inner: int) -> list[Spec]:
    """Where `int8_products` leaves its sums: the last of these tensors."""
    shape = rows, columns
    return [(shape, torch.int32), *([(shape, torch.float32)] if inner > gemm.LARGEST_INNER else [])]


def int8_products(
    a: torch.Tensor,
    b: torch.Tensor,
    sums: torch.Tensor,
    total: torch.Tensor | None = None,
    *,
    op: str = Product.op,
) -> list[Product | Launch]:
    """What makes sums int32 [M, N] = a int8 [M, K] times b int8 [N, K] transposed; nothing for an
    empty batch.

    Args:
        a, b, sums: see above.
        total: float32 [M, N], where K is longer than one int32 sum may be: the sums of its parts.
        op: who reads the sums, where tuned files tell (lsq.native.launch.Product).

    Raises:
        ValueError: N or K is no multiple of 16.
    """
    check_columns(
        16, **{"the inner width of an int8 product": a.shape[1], "its outer width": b.shape[0]}
    )
    if not sums.numel():
        return []
    if total is None:
        return [Product(a=a, b=b, out=sums, op=op)]
    entries = []
    for part in gemm.inner_parts(a.shape[1]):
        entries.append(Product(a=a[:, part], b=b[:, part], out=sums))
        entries.append(add_sums(sums, total, adds=part.start > 0))
    return entries


def converted_scratch(values: torch.Tensor, dtype: torch.dtype) -> list[Spec]:
    """What `converted` needs."""
    return [] if values.dtype == dtype else [(tuple(values.shape), dtype)]


def converted(
    values: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    scratch: Iterator[torch.Tensor],
) -> tuple[list[Launch], torch.Tensor]:
    """(launches, values [M, N] in `dtype`): codes times their scale [M] or [1], or floats of
    another dtype.

    Raises:
        ValueError: N is no multiple of 8.
    """
    if values.dtype == dtype:
        return [], values
    check_columns(8, **{"the width of an operand to convert": values.shape[1]})
    out = next(scratch)
    return [float_operand(values, scale, out)], out
