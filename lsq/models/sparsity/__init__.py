"""2:4 sparsity: of four neighbouring inputs of a weight's row, two count; see docs/numbers.md."""

from lsq.models.sparsity.packed import Packed, pack, product, unpack
from lsq.models.sparsity.pattern import choose, is_sparse
from lsq.models.sparsity.sparsify import Sparsity, sparsify, sparsity_of, wants_sparsity
from lsq.quant.pruning import Pruning, check_width

__all__ = [
    "Packed",
    "Pruning",
    "Sparsity",
    "check_width",
    "choose",
    "is_sparse",
    "pack",
    "product",
    "sparsify",
    "sparsity_of",
    "unpack",
    "wants_sparsity",
]
