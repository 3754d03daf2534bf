"""Integer matrix products: int8 operands, exact int32 sums.

Every product is a [M, K] times b [N, K] transposed; either operand may be a transposed view.
"""

from lsq.gemm.lookup import set_files
from lsq.gemm.operation import multiply_into, row_blocks, scratch_for
from lsq.gemm.product import LARGEST_INNER, int8_product, reference

__all__ = [
    "LARGEST_INNER",
    "int8_product",
    "multiply_into",
    "reference",
    "row_blocks",
    "scratch_for",
    "set_files",
]
