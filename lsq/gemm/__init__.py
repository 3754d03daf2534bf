"""What is multiplied, and by what: products as tuned files say, of lsq's tiles or oneDNN, on a GPU of cuBLASLt.

Every product is a [M, K] times b [N, K] transposed; either operand may be a transposed view. lsq.tune makes the files.
"""

from lsq.gemm.cpu import multiply, requested, row_blocks, scratch_for, untuned_product
from lsq.gemm.cpu_product import int8_product, reference
from lsq.gemm.lookup import set_files
from lsq.gemm.product_key import LARGEST_INNER

__all__ = [
    "LARGEST_INNER",
    "int8_product",
    "multiply",
    "reference",
    "requested",
    "row_blocks",
    "scratch_for",
    "set_files",
    "untuned_product",
]
