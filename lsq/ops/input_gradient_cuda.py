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
    reads_transposed,
    sums_scratch,
    tiled,
    transpose_codes,
)
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import PADDING, KernelSums, parts_of
from lsq.program.cuda import kernel_sums, launches, scratch_of

PRODUCTS = {torch.int32: 0, torch.float32: 1}  # dtype -> -DPRODUCT; 2 (Float) for the others.
LONG_SUMS = 3  # -DPRODUCT of float32 sums of codes.


def _tile(op: ProjectInputGradient) -> TileConfiguration | None:
    """Return the tiles of one kernel for product and epilogue; None: a library multiplies."""
    # rounding needs the largest magnitude of a row, over all of its tiles
    if op.gradient is None or op.rounded is not None:
        return None
    return gemm.cuda_tile(GEMM, op.rows, op.columns, op.gradient.codes.shape[1])


@kernel_sums.register(ProjectInputGradient)
def sums_of_project_input_gradient(op: ProjectInputGradient) -> list[KernelSums]:
    """Tiles leave a part for each row of warps, with a number for the clip from each warp."""
    tile, clips, spec = _tile(op), 1, parts_of(op.rows, op.columns)
    if tile is not None:
        across, down = tile.blocks(op.rows, op.columns)
        clips = tile.warps[1] * across
        width = op.columns + -(-clips // PADDING) * PADDING
        spec = (tile.warps[0] * down, width), torch.float32

    def of(parts) -> PartialSums:
        return PartialSums.of(parts, op.columns, (op.sum,), op.dclip, op.x, clips)

    return [KernelSums(op, spec, of, ("sum", "dclip"))]


@scratch_of.register(ProjectInputGradient)
def scratch_of_project_input_gradient(op: ProjectInputGradient):
    (over_rows,), shape = kernel_sums(op), (op.rows, op.columns)
    partial = over_rows.scratch
    if op.gradient is not None:
        sums = sums_scratch(*shape, op.gradient.codes.shape[1]) if _tile(op) is None else []
        transposed = tuple(reversed(op.weight.matrix.shape)), torch.int8
        wanted = op.weight.transposed is None and reads_transposed(_tile(op))
        return [*partial, *([transposed] if wanted else []), *sums]
    dtype = _product_dtype(op)
    product = [] if _in_place(op) else [(shape, torch.float32)]
    operands = [*converted_scratch(op.weight.matrix, dtype), *converted_scratch(op.floats, dtype)]
    return [*partial, *product, *operands]


@launches.register(ProjectInputGradient)
def launch_project_input_gradient(op: ProjectInputGradient, *scratch):
    left, (sums,) = iter(scratch), kernel_sums(op)
    partial = sums.take(left)
    entries_of = _int8_entries if op.gradient is not None else _float_entries
    return [*entries_of(op, partial, left), *sums.finish(partial)]


def _int8_entries(op: ProjectInputGradient, partial, scratch):
    tile, weight, transposed = _tile(op), op.weight.transposed, []
    if weight is None and reads_transposed(tile):
        weight = next(scratch)
        transposed = [transpose_codes(op.weight.codes, weight)]
    if tile is not None:
        return [*transposed, input_gradient_product(op, tile, weight, partial)]
    name = GEMM if op.rounded is None else Product.op  # Product.op: no kernel with the epilogue
    sums = list(scratch)
    products = int8_products(op.gradient.codes, weight, *sums, op=name)
    return [*transposed, *products, _epilogue(op, sums[-1], partial)]


def _float_entries(op: ProjectInputGradient, partial, scratch):
    product = op.dx if _in_place(op) else next(scratch)
    weights, weight = converted(op.weight.matrix, op.weight.scale, _product_dtype(op), scratch)
    gradients, gradient = converted(op.floats, None, _product_dtype(op), scratch)
    multiply = Product(a=gradient, b=weight, out=product, transpose_b=not op.weight.operand_in_out)
    return [*weights, *gradients, *([multiply] if op.rows else []), _epilogue(op, product, partial)]


def _epilogue(op: ProjectInputGradient, product, partial) -> Launch:
    long = op.gradient is not None and product.dtype == torch.float32
    return launch(
        "input_gradient.cu",
        "lsq_project_input_gradient",
        op,
        product,
        partial,
        grid=len(partial),
        PRODUCT=LONG_SUMS if long else PRODUCTS.get(product.dtype, 2),
        ROUNDED=int(op.rounded is not None),
        **_defines(op),
        **row_defines(op.columns),
    )


def _product_dtype(op: ProjectInputGradient) -> torch.dtype:
    return op.floats.dtype if op.weight.codes is None else torch.float32


def _in_place(op: ProjectInputGradient) -> bool:
    """Return whether a product of floats can be written straight into dx."""
    return op.dx is not None and op.dx.dtype in (torch.float32, _product_dtype(op))


def _defines(op: ProjectInputGradient) -> dict[str, int]:
    """Return the -D definitions for csrc/cuda/input_gradient_epilogue.cuh."""
    end = op.nonlinearity
    before = end and end.before
    slope = {} if before is None else {"ACTIVATION": int(end.activation)}
    accumulated = {} if op.accumulated is None else {"ACCUMULATED": 1}
    read = op.floats, before, op.accumulated, op.added, op.dx
    given = [one for one in read if one is not None]
    floats = float_define(*given) if given else {"FLOAT": FLOATS[torch.float32]}
    return slope | accumulated | floats


def input_gradient_product(
    op: ProjectInputGradient, tile: TileConfiguration, weight: torch.Tensor, partial: torch.Tensor
) -> Launch:
    """Return the launch that does the whole operation, except for finishing its sums.

    `weight`: int8 [K, P], its codes transposed, or None; `partial`: parts of its sums.
    """
    check(
        op.rounded is None,
        "a product that ends by tiles has floats: to round a row takes all of its tiles",
    )
    source, name = "input_gradient_product.cu", "lsq_input_gradient_product"
    inner, columns = op.weight.codes.shape
    arguments = op, weight, inner, partial, partial.shape[1]
    return tiled(source, name, tile, (op.rows, columns, inner), *arguments, **_defines(op))
