"""int8 matrix products: by lsq's tiles on a CPU; on a GPU by lsq's kernels or cuBLASLt, as a tuned
file or a rule decides.

Every product is a [M, K] times b [N, K] transposed; both may be transposed views. lsq.gemm.tuner
makes the files.
"""

from typing import TYPE_CHECKING

from lsq.extras import lazily
from lsq.gemm.cpu import int8_product, multiply, reference, scratch_for, untuned_product
from lsq.gemm.cuda import ended_by
from lsq.gemm.operations import LARGEST_INNER, inner_parts, is_long

if TYPE_CHECKING:
    from lsq.gemm.lookup import cuda_tile

__all__ = [
    "LARGEST_INNER",
    "cuda_tile",
    "ended_by",
    "inner_parts",
    "int8_product",
    "is_long",
    "multiply",
    "reference",
    "scratch_for",
    "untuned_product",
]
__getattr__ = lazily(__name__, {"cuda_tile": "lookup"})  # a CPU needs no files
