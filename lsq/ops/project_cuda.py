"""Launches of lsq.ops.project."""

from dataclasses import dataclass
from typing import ClassVar

from lsq import gemm
from lsq.gemm import LARGEST_INNER
from lsq.gemm.configuration import SHARED_BYTES, TILE_STAGES, TileConfiguration
from lsq.native.geometry import VECTOR, patches
from lsq.native.launch import TICKET, Launch, Product, check, float_define, launch
from lsq.ops.launches import (
    SUMS,
    check_columns,
    converted,
    converted_scratch,
    int8_products,
    started,
    sums_scratch,
    tiled,
)
from lsq.ops.nonlinearity import Nonlinearity
from lsq.ops.project import GEMM, Project
from lsq.program.cuda import launches, scratch_of
from lsq.quant import WeightFormat
from lsq.quant.stored import Fields

FIELD_STEP = 128
"""Values along K in a stage of a product with packed fields (csrc/cuda/product_copies.cuh)."""


@dataclass(frozen=True, kw_only=True)
class FieldTile(TileConfiguration):
    """Tiles of a product with packed fields, whose columns are narrow in shared memory."""

    ROWS: ClassVar = (32, *TileConfiguration.ROWS)
    bits: int
    """Width of a code."""

    @property
    def stage_bytes(self) -> int:
        return (8 * self.rows + self.bits * self.columns) * FIELD_STEP // 8


@scratch_of.register(Project)
def scratch_of_project(op: Project):
    if op.x.coded is None:
        return converted_scratch(op.weight.matrix, op.x.floats.dtype)
    return sums_scratch(op.rows, op.columns, op.x.tensor.shape[1]) if _tile(op) is None else []


def _tile(op: Project) -> TileConfiguration | None:
    """Return the tiles of one kernel for product and epilogue; None: cuBLASLt multiplies."""
    if op.weight.format.packed:
        return packed_tile(op.weight.format, op.rows, op.x.tensor.shape[1])
    return gemm.cuda_tile(GEMM, op.rows, *op.weight.codes.shape)


@launches.register(Project)
def launch_project(op: Project, *scratch):
    if op.x.coded is not None:
        if not scratch:
            return [project_product(op, _tile(op))]
        products = int8_products(op.x.tensor, op.weight.codes, *scratch, op=GEMM)
        return [*products, _epilogue(op, scratch[-1])]
    if op.rows == 0:
        return []
    conversion, weight = converted(op.weight.matrix, None, op.x.floats.dtype, iter(scratch))
    product = Product(a=op.x.floats, b=weight, out=op.out, transpose_b=op.weight.operand_in_out)
    return [*conversion, product, *([_epilogue(op, None)] if op.has_epilogue else [])]


def _epilogue(op: Project, sums):
    check_columns(VECTOR, **{"the width of a product with an end": op.columns})
    end = op.nonlinearity or Nonlinearity()
    floats = [tensor for tensor in (op.x.floats, op.out, end.before) if tensor is not None]
    return launch(
        "project.cu",
        "lsq_end",
        op,
        sums,
        TICKET,
        grid=patches(op.rows, op.columns),
        ACTIVATION=int(end.activation),
        SUMS=0 if sums is None else SUMS[sums.dtype],
        **started(op.rounded),
        **(float_define(*floats) if floats else {}),
    )


def project_product(op: Project, tile: TileConfiguration) -> Launch:
    """Return the one launch of a `Project` of codes; without rows it only writes the scale."""
    inner, end = op.x.tensor.shape[1], op.nonlinearity or Nonlinearity()
    defines = {"ACTIVATION": int(end.activation), **started(op.rounded)}
    if isinstance(tile, FieldTile):
        defines["FIELD_BITS"] = tile.bits
    elif op.weight.format.packed:
        defines["INT4"] = 1
    defines |= {} if op.out is None else float_define(op.out)
    shape = op.rows, op.columns, inner
    source, name = "project_product.cu", "lsq_project_product"
    return tiled(source, name, tile, shape, op, inner, TICKET, **defines)


def packed_tile(form: WeightFormat, rows: int, inner: int) -> TileConfiguration:
    """Return the tiles for a weight that is stored as int4 or fields, for mma.sync on every GPU."""
    check(
        inner <= LARGEST_INNER,
        f"a weight that is stored as {form.name} has {inner} inputs; on CUDA it may have"
        f" {LARGEST_INNER}: choose int8",
    )
    height = 64 if rows <= 64 else 128
    if not isinstance(form, Fields):
        return TileConfiguration(rows=height, columns=64, stages=4)
    shape = {"rows": 32 if rows <= 32 else height, "columns": 64, "bits": form.bits}
    stages = SHARED_BYTES["mma"] // FieldTile(**shape, stages=2).stage_bytes
    return FieldTile(**shape, stages=min(stages, TILE_STAGES["mma"][1]))
