"""What is multiplied, and by what: as tuned files say, by lsq's tiles or oneDNN, on a GPU by lsq's
or cuBLASLt.

Every product is a [M, K] times b [N, K] transposed; either operand may be a transposed view.
lsq.gemm.tuner makes the files.
"""

from lsq.gemm.configuration import TileConfiguration
from lsq.gemm.cpu import multiply, scratch_for, tiled, untuned_product
from lsq.gemm.cpu_product import int8_product, reference
from lsq.gemm.cuda import cuda_tile, ended_by
from lsq.gemm.lookup import set_files
from lsq.gemm.product_key import LARGEST_INNER, inner_parts, is_long
from lsq.gemm.requested import requested

__all__ = [
    "LARGEST_INNER",
    "TileConfiguration",
    "cuda_tile",
    "ended_by",
    "inner_parts",
    "int8_product",
    "is_long",
    "multiply",
    "reference",
    "requested",
    "scratch_for",
    "set_files",
    "tiled",
    "untuned_product",
]
