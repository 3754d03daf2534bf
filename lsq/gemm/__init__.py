"""Integer matrix products: int8 operands, exact int32 sums.

Every product is a [M, K] times b [N, K] transposed; either operand may be a transposed view.
"""

from lsq.gemm.lookup import add_seconds, configuration_for, coverage_report, largest_scratch, set_files
from lsq.gemm.product import LARGEST_INNER, block_scratch, int8_product, reference, row_blocks

__all__ = [
    "LARGEST_INNER",
    "add_seconds",
    "block_scratch",
    "configuration_for",
    "coverage_report",
    "int8_product",
    "largest_scratch",
    "reference",
    "row_blocks",
    "set_files",
]
