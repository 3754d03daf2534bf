"""Operands for trials, and an exact check of int32 sums without a second product.

Each row of the sums times a random vector, modulo 2^64: out r = a (b^T r) holds for every r if out
is right. If any sum of a row is wrong, the row passes for at most one in 2^32 of the vectors r (the
difference of two int32 numbers is no multiple of a higher power of two), and r is random. This
takes M * N operations where the product takes M * N * K.
"""

import torch

from lsq.gemm.product_key import ProductKey

_ELEMENTS = 2**18
"""Numbers that are widened to int64 at a time: they stay in the cache."""


LARGEST = torch.iinfo(torch.int8).max
"""Largest code that products are tried with."""


def whole_numbers(
    key: ProductKey, name: str, largest: int, generator: torch.Generator
) -> torch.Tensor:
    """int8 [length] of operand "a" or "b": all values up to `largest`, which fills the first row
    and column.

    There, sums are largest: narrow instructions saturate.
    """
    made = torch.randint(
        -largest, largest + 1, (key.lengths[name],), dtype=torch.int8, generator=generator
    )
    matrix = laid(made, key, name)
    matrix[0], matrix[:, 0] = largest, -largest
    return made


def laid(flat: torch.Tensor, key: ProductKey, name: str) -> torch.Tensor:
    """Elements [length] as the matrix "a", "b" or "out" that lies as a key says."""
    return flat.as_strided(key.matrices[name], (key.places[f"leading_{name}"], 1))


class RowChecksums:
    """What the rows of a int8 [M, K] times b int8 [N, K] transposed must come to."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        self._vector = torch.randint(least, most, (b.shape[0],), generator=generator).to(b.device)
        self._expected = _times(a, _times(b.t(), self._vector))

    def first_wrong_row(self, sums: torch.Tensor, first: int = 0) -> int | None:
        """The first row of `sums` int32 [rows, N], which are the product's from row `first` on,
        that is wrong."""
        found = _times(sums, self._vector)
        wrong = (found != self._expected[first : first + len(sums)]).nonzero()
        return None if len(wrong) == 0 else first + int(wrong[0])


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """int64 [R]: integers [R, C] times int64 [C], modulo 2^64."""
    rows = max(1, _ELEMENTS // matrix.shape[1])
    return torch.cat([(block.to(torch.int64) * vector).sum(dim=1) for block in matrix.split(rows)])
