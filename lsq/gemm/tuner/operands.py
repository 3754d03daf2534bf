"""Operands for trials, and an exact check of int32 sums without a second product.

The check multiplies each row of the sums by a random vector r, modulo 2^64: out r = a (b^T r) holds
for every r if out is right. A row with a wrong sum passes for at most one in 2^32 of the vectors,
since the difference of two int32 numbers is no multiple of a higher power of two. The check takes
M * N operations, the product M * N * K.
"""

import torch

from lsq.gemm.product_key import ProductKey

_ELEMENTS = 2**18
"""Numbers that are widened to int64 at a time: they stay in the cache."""
LARGEST = torch.iinfo(torch.int8).max
"""Largest code of operands."""


def whole_numbers(
    key: ProductKey, name: str, largest: int, generator: torch.Generator
) -> torch.Tensor:
    """int8 [length] of operand "a" or "b": random values up to `largest`, which fills the first row
    and column, so that sums are largest there and narrow instructions saturate."""
    values = torch.randint(
        -largest, largest + 1, (key.lengths[name],), dtype=torch.int8, generator=generator
    )
    matrix = laid(values, key, name)
    matrix[0], matrix[:, 0] = largest, -largest
    return values


def laid(flat: torch.Tensor, key: ProductKey, name: str) -> torch.Tensor:
    """Elements [length] viewed as the matrix "a", "b" or "out" of a key."""
    return flat.as_strided(key.matrices[name], (key.leading[f"leading_{name}"], 1))


class RowChecksums:
    """Checksums of the rows of a int8 [M, K] times b int8 [N, K] transposed."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        self._vector = torch.randint(least, most, (b.shape[0],), generator=generator).to(b.device)
        self._expected = _times(a, _times(b.t(), self._vector))

    def first_wrong_row(self, sums: torch.Tensor) -> int | None:
        """The first wrong row of `sums` int32 [M, N]."""
        wrong = (_times(sums, self._vector) != self._expected).nonzero()
        return None if len(wrong) == 0 else int(wrong[0])


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """int64 [R]: integers [R, C] times int64 [C], modulo 2^64."""
    rows = max(1, _ELEMENTS // matrix.shape[1])
    return torch.cat([(block.to(torch.int64) * vector).sum(dim=1) for block in matrix.split(rows)])
