"""The int8 product of the CPU: oneDNN through torch._int_mm, and its exact reference."""

import torch

LARGEST_INNER = (2**31 - 1) // 127**2
"""Inner dimension up to which no int32 sum of products of codes can overflow: 133,144."""


def check_inner(inner: int) -> None:
    """Refuse an inner dimension whose sums could overflow int32.

    Raises:
        ValueError: `inner` is larger than LARGEST_INNER.
    """
    if inner > LARGEST_INNER:
        raise ValueError(
            f"an int8 product over {inner} values could overflow int32; the largest inner dimension is "
            f"{LARGEST_INNER} (use smaller batches or a smaller vocabulary)"
        )


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a int8 [M, K], b int8 [N, K] -> int32 [M, N], through float64, in which every sum is exact."""
    return (a.to(torch.float64) @ b.to(torch.float64).t()).to(torch.int32)


def int8_product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """a int8 [M, K], b int8 [N, K] -> int32 [M, N].

    Raises:
        ValueError: K could overflow the sums.
    """
    check_inner(a.shape[1])
    a, b = _unambiguous(a), _unambiguous(b)
    if out is None:
        return torch._int_mm(a, b.t())
    return torch._int_mm(a, b.t(), out=out)


def _unambiguous(x: torch.Tensor) -> torch.Tensor:
    """x [1, n] or [n, 1] with strides that say which; with strides (1, 1), torch._int_mm (2.13) reads past its end."""
    if x.stride() != (1, 1):
        return x
    rows, columns = x.shape
    return x.as_strided(x.shape, (columns, 1) if rows == 1 else (1, rows))
