"""Launches of lsq.ops.input_gradient."""

import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.native.geometry import row_defines
from lsq.native.launch import FLOATS, Launch, Product, check, float_define, launch
from lsq.ops.input_gradient import GEMM, ProjectInputGradient
from lsq.ops.launches import (
    converted,
    converted_scratch,
    int8_products,
    sums_scratch,
    tiled,
    transpose_codes,
)
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import PADDING, check_parts, finish, parts_of
from lsq.program.cuda import launches, leave_sums, scratch_of
from lsq.program.operation import Spec

PRODUCTS = {torch.int32: 0, torch.float32: 1}
"""-DPRODUCT by dtype; else 2: Float."""

LONG_SUMS = 3
"""-DPRODUCT of sums of codes as float32."""


def _tile(op: ProjectInputGradient) -> TileConfiguration | None:
    """Tiles of the one kernel for product and epilogue; None: a library multiplies, and a
    kernel applies the epilogue."""
    # to round a row takes all of its tiles
    if op.gradient is None or op.rounded is not None:
        return None
    return gemm.cuda_tile(GEMM, op.rows, op.columns, op.gradient.codes.shape[1])


def _parts(op: ProjectInputGradient) -> Spec:
    """(shape, dtype) of what a GPU leaves of the sums."""
    tile = _tile(op)
    return (
        parts_of(op.rows, op.columns, 1) if tile is None else tile_parts(tile, op.rows, op.columns)
    )


@scratch_of.register(ProjectInputGradient)
def scratch_of_project_input_gradient(op: ProjectInputGradient):
    partial = [] if op.parts is not None else [_parts(op)]
    shape = op.rows, op.columns
    if op.gradient is not None:
        sums = sums_scratch(*shape, op.gradient.codes.shape[1]) if _tile(op) is None else []
        transposed = tuple(reversed(op.weight.matrix.shape)), torch.int8
        return [*partial, *([transposed] if op.weight.transposed is None else []), *sums]
    dtype = _product_dtype(op)
    product = [] if _in_place(op) else [(shape, torch.float32)]
    operands = [*converted_scratch(op.weight.matrix, dtype), *converted_scratch(op.floats, dtype)]
    return [*partial, *product, *operands]


@leave_sums.register(ProjectInputGradient)
def leave_sums_of_project_input_gradient(op: ProjectInputGradient, tensor):
    found = _sums(op, tensor(op.outputs[0].name + ".parts", *_parts(op)))
    if not found.wanted:
        return []
    op.parts, op.sum, op.dclip = found.parts, None, None
    return [found]


def _sums(op: ProjectInputGradient, parts) -> PartialSums:
    tile = _tile(op)
    clips = 1 if tile is None else clip_parts(tile, op.columns)
    return PartialSums.of(parts, op.columns, (op.sum,), op.dclip, op.x, clips)


@launches.register(ProjectInputGradient)
def launch_project_input_gradient(op: ProjectInputGradient, *scratch):
    partial, *scratch = scratch if op.parts is None else (op.parts, *scratch)
    check_parts(partial, _parts(op))
    entries_of = _int8_entries if op.gradient is not None else _float_entries
    entries = entries_of(op, partial, scratch)
    return [*entries, *finish(_sums(op, partial), leaves=op.parts is not None)]


def _int8_entries(op: ProjectInputGradient, partial, scratch):
    tile, weight, transposed = _tile(op), op.weight.transposed, []
    if weight is None:
        weight, *scratch = scratch
        transposed = [transpose_codes(op.weight.codes, weight)]
    if tile is not None:
        return [*transposed, input_gradient_product(op, tile, weight, partial)]
    name = GEMM if op.rounded is None else Product.op  # which no kernel ends
    products = int8_products(op.gradient.codes, weight, *scratch, op=name)
    return [*transposed, *products, _epilogue(op, scratch[-1], partial)]


def _float_entries(op: ProjectInputGradient, partial, scratch):
    scratch = iter(scratch)
    product = op.dx if _in_place(op) else next(scratch)
    weights, weight = converted(op.weight.matrix, op.weight.scale, _product_dtype(op), scratch)
    gradients, gradient = converted(op.floats, None, _product_dtype(op), scratch)
    multiply = Product(a=gradient, b=weight, out=product, transpose_b=not op.weight.operand_in_out)
    return [*weights, *gradients, *([multiply] if op.rows else []), _epilogue(op, product, partial)]


def _epilogue(op: ProjectInputGradient, product, partial):
    before = op.nonlinearity and op.nonlinearity.before
    long = op.gradient is not None and product.dtype == torch.float32
    given = [one for one in (op.floats, before, op.accumulated, op.added, op.dx) if one is not None]
    return launch(
        "input_gradient.cu",
        "lsq_project_input_gradient",
        op,
        product,
        partial,
        grid=len(partial),
        PRODUCT=LONG_SUMS if long else PRODUCTS.get(product.dtype, 2),
        ROUNDED=int(op.rounded is not None),
        **epilogue_defines(op),
        **(float_define(*given) if given else {"FLOAT": FLOATS[torch.float32]}),
        **row_defines(op.columns),
    )


def _product_dtype(op: ProjectInputGradient) -> torch.dtype:
    return op.floats.dtype if op.weight.codes is None else torch.float32


def _in_place(op: ProjectInputGradient) -> bool:
    """Whether the product of floats on a GPU can be written where its end goes."""
    return op.dx is not None and op.dx.dtype in (torch.float32, _product_dtype(op))


def epilogue_defines(op: ProjectInputGradient) -> dict[str, int]:
    """-D for csrc/cuda/input_gradient_epilogue.cuh, of what few ends have."""
    end = op.nonlinearity
    slope = {} if end is None or end.before is None else {"ACTIVATION": int(end.activation)}
    return slope | ({} if op.accumulated is None else {"ACCUMULATED": 1})


def clip_parts(tile: TileConfiguration, columns: int) -> int:
    """Numbers for the clip in each row of parts: one of each warp across."""
    return tile.warps[1] * tile.blocks(0, columns)[0]


def tile_parts(tile: TileConfiguration, rows: int, columns: int) -> Spec:
    """(shape, dtype) of the parts that the kernel leaves (lsq.ops.sums): a row of each row of
    warps."""
    width = columns + -(-clip_parts(tile, columns) // PADDING) * PADDING
    return (tile.warps[0] * tile.blocks(rows, columns)[1], width), torch.float32


def input_gradient_product(
    op: ProjectInputGradient, tile: TileConfiguration, weight: torch.Tensor, partial: torch.Tensor
) -> Launch:
    """The one launch that does what the operation does, but for finishing its sums.

    Args:
        op: of a gradient in codes.
        tile: not in parts.
        weight: int8 [K, P], its codes transposed.
        partial: as `tile_parts` says.

    Raises:
        ValueError: it ends in codes, whose scales want whole rows; or the kernel does not take the
            shape.
    """
    check(
        op.rounded is None,
        "a product that ends by tiles has floats: to round a row takes all of its tiles",
    )
    before = op.nonlinearity and op.nonlinearity.before
    given = [one for one in (before, op.accumulated, op.added, op.dx) if one is not None]
    columns, inner = weight.shape
    return tiled(
        "input_gradient_product.cu",
        "lsq_input_gradient_product",
        tile,
        (op.rows, columns, inner),
        op,
        weight,
        inner,
        partial,
        partial.shape[1],
        **float_define(*given),
        **epilogue_defines(op),
    )
