"""2:4 sparsity: of four neighbouring inputs of a weight's row, two count; see docs/sparsity.md."""

from lsq.sparsity.packed import Packed, pack, product, unpack
from lsq.sparsity.pattern import check_width, choose, is_sparse
from lsq.sparsity.pruning import Pruning
from lsq.sparsity.sparsify import Sparsity, sparsify

__all__ = [
    "Packed", "Pruning", "Sparsity", "check_width", "choose", "is_sparse", "pack", "product", "sparsify", "unpack",
]  # fmt: skip
