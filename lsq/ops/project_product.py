"""A product of codes and its end in one kernel, whose sums never go through memory: another way to
a `Project` on CUDA.

M rows, P columns, K inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lsq.gemm import LARGEST_INNER, TileConfiguration
from lsq.native.launch import TICKET, Launch, check, float_define
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.scales import started
from lsq.ops.tiled_product import tiled

if TYPE_CHECKING:
    from lsq.ops.project import Project


def project_product(operation: Project, tile: TileConfiguration) -> Launch:
    """The one launch that does what a `Project` of codes does; a launch without rows writes its
    scale.

    Raises:
        ValueError: K or P is no multiple of 16, or there are more rows than a grid has blocks for.
    """
    inner, end = operation.x.tensor.shape[1], operation.nonlinearity or Nonlinearity()
    stored = {"INT4": 1} if operation.weight.format.packed else {}
    return tiled(
        "project_product.cu",
        "lsq_project_product",
        tile,
        (operation.rows, operation.columns, inner),
        operation,
        inner,
        TICKET,
        ACTIVATION=int(end.activation),
        **started(operation.rounded),
        **stored,
        **({} if operation.out is None else float_define(operation.out)),
    )


def packed_tile(rows: int, inner: int) -> TileConfiguration:
    """For a weight that is stored as int4, by mma.sync on every GPU: many rows share what they
    unpack.

    Raises:
        ValueError: K is longer than one int32 sum may be.
    """
    check(
        inner <= LARGEST_INNER,
        f"a weight that is stored as int4 has {inner} inputs; on CUDA it may have {LARGEST_INNER}:"
        " choose int8",
    )
    return TileConfiguration(rows=64 if rows <= 64 else 128, columns=64, stages=4)
