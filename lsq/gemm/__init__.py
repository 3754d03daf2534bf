"""Integer matrix products: int8 operands, exact int32 sums.

Every product is a [M, K] times b [N, K] transposed; either operand may be a transposed view.
"""

from lsq.gemm.product import LARGEST_INNER, block_scratch, int8_product, reference, row_blocks

__all__ = ["LARGEST_INNER", "block_scratch", "int8_product", "reference", "row_blocks"]
