"""Launches of lsq.ops.adapter."""

import torch

from lsq.native.geometry import THREADS, VECTOR
from lsq.native.launch import TICKET, Launch, Product, float_define, launch
from lsq.ops.adapter import Adapt, AdapterInput, AdapterInputGradient, AdaptGradient
from lsq.ops.launches import check_columns, converted, converted_scratch, started
from lsq.ops.nonlinearity import Nonlinearity
from lsq.program.cuda import launches, scratch_of


@launches.register(AdapterInput)
def launch_adapter_input(op: AdapterInput):
    _check_width(op.columns)
    codes = op.x.coded is not None
    defines = {"CODES": 1} if codes else float_define(op.x.floats)
    return _launch("lsq_adapter_input", op.values.numel(), op, **defines)


@launches.register(AdapterInputGradient)
def launch_adapter_input_gradient(op: AdapterInputGradient):
    _check_width(op.columns)
    given = [one for one in (op.added, op.dx) if one is not None]
    return _launch("lsq_adapter_input_gradient", op.dx.numel(), op, **float_define(*given))


@scratch_of.register(Adapt)
def scratch_of_adapt(op: Adapt):
    return [(tuple(op.base.shape), torch.float32)]


@launches.register(Adapt)
def launch_adapt(op: Adapt, product):
    check_columns(VECTOR, **{"the outputs of a product with adapters": op.columns})
    end, products = op.nonlinearity or Nonlinearity(), []
    if op.rows:  # without rows the epilogue may still write a scale
        products = [
            Product(a=op.values, b=op.down, out=op.hidden),
            Product(a=op.hidden, b=op.up, out=product),
        ]
    ending = launch(
        "adapter.cu",
        "lsq_adapt",
        op,
        product,
        TICKET,
        grid=max(1, _blocks(op.base.numel())),
        ACTIVATION=int(end.activation),
        **started(op.rounded),
        **float_define(op.base, op.out, end.before),
    )
    return [*products, ending]


@scratch_of.register(AdaptGradient)
def scratch_of_adapt_gradient(op: AdaptGradient):
    hidden = tuple(op.hidden.shape), torch.float32
    return [hidden, *converted_scratch(op.gradient, torch.float32)]


@launches.register(AdaptGradient)
def launch_adapt_gradient(op: AdaptGradient, dhidden, *scratch):
    if not op.values.numel():
        return []
    widened, gradient = converted(op.gradient, None, torch.float32, iter(scratch))
    products = [
        Product(a=gradient, b=op.up, out=dhidden, transpose_b=True),
        Product(a=dhidden, b=op.values, out=op.ddown, transpose_a=True, transpose_b=True),
        Product(a=gradient, b=op.hidden, out=op.dup, transpose_a=True, transpose_b=True),
        Product(a=dhidden, b=op.down, out=op.dvalues, transpose_b=True),
    ]
    return [*widened, *(product for product in products if product.out is not None)]


def _check_width(columns: int) -> None:
    check_columns(VECTOR, **{"the width of an adapter's input": columns})


def _blocks(count: int) -> int:
    """Return the blocks of a kernel over `count` values, a multiple of VECTOR."""
    return -(-count // (VECTOR * THREADS))


def _launch(name: str, count: int, *arguments, **defines: int) -> list[Launch]:
    """Launch a kernel over `count` values; return nothing for 0 values."""
    grid = _blocks(count)
    return [launch("adapter.cu", name, *arguments, grid=grid, **defines)] if grid else []
