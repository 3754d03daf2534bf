"""ProjectInputGradient against autograd through a straight-through composite in float64."""

import dataclasses
import math

import pytest
import torch

from lsq import gemm
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.nonlinearity import SLOPE_UNIT, Activation, Nonlinearity
from lsq.program.values import Coded, RoundedGradient, Weight
from lsq.quant import GRADIENT, arithmetic, pack_bits, quantize
from tests.ops.compare import (
    KEY,
    compare,
    dropout_of,
    empty,
    format_of,
    gradient_to_round,
    on_cpu,
    on_reference,
    refused,
    weight_format_of,
)
from tests.ops.cuda import compare_cuda, run
from tests.ops.products import WAYS, assert_same_bits
from tests.ops.test_project import PLAIN, SMOOTH, slope_by_autograd
from tests.ops.tiles import SMALL, compare_ways, in_one
from tests.quant.fake import fake_quantize

BLOCK_ROWS = 512
COLUMNS, OUTPUTS, PADDED = 48, 29, 32
MODES = ("int8", "float", "float mode")


def weight_of(outputs=OUTPUTS, columns=COLUMNS, *, clips=None, bits=8, padded=PADDED):
    """A weight [N, K] with much of it clipped, and its codes [P, K]; `clips`: N unless given."""
    values, clip = torch.randn(outputs, columns), 0.8 + torch.rand(clips or outputs)
    codes, scale, _ = quantize(values, clip, bits)
    below = padded - outputs
    return Weight(
        format=weight_format_of(bits),
        codes=torch.cat([codes, torch.zeros(below, columns, dtype=torch.int8)]),
        scale=torch.cat([scale.expand(outputs), torch.ones(below)]),
        values=values,
        clip=clip,
    )


def coded(x, clip=1.2, *, bits=8, learned_step=False):
    """x [M, K] after rounding."""
    clip = torch.tensor([clip])
    made = arithmetic.round_activation(x, clip, bits=bits, error=learned_step)
    fields = dict(zip(("codes", "scale", "clipped", "error"), made, strict=True))
    return Coded(format=format_of(bits), **fields, clip=clip)


def upstream(mode, weight, rows):
    """Fields with the gradient of the product: rounded, or floats [M, P or N]."""
    if mode == "float mode":
        return {"floats": torch.randn(rows, len(weight.values))}
    floats = torch.randn(rows, len(weight.codes))
    # what belongs to no row of the weight does not count, whatever it is
    floats[:, len(weight.values) :] *= 0.01
    if mode == "float":
        return {"floats": floats}
    codes, scale = arithmetic.round_rows(floats, weight.scale, KEY, 1)
    common = {"format": GRADIENT, "weight_scale": weight.scale, "key": KEY, "subsequence": 1}
    return {"gradient": RoundedGradient(codes=codes, scale=scale, **common)}


def end_of(kind, mask, y, mode):
    """An activation of y and its dropout, with what the forward pass keeps; None for neither."""
    found = Nonlinearity(activation=kind, dropout=mask)
    if kind == Activation.relu:
        found.positive = pack_bits(y > 0)
    elif kind in SMOOTH and mode != "float mode":
        found.slope = (slope_by_autograd(kind, y) * SLOPE_UNIT).round().to(torch.int8)
    elif kind != Activation.none:
        found.before = y
    return None if kind == Activation.none and mask is None else found


def case(
    rows,
    mode="int8",
    *,
    kind=Activation.none,
    dropout=0.0,
    learned_step=False,
    accumulated=False,
    added=False,
    rounded=False,
    clips=None,
    columns=COLUMNS,
    rest=True,
    padded=PADDED,
):
    """(operation, y before the activation); `rest`: sums are wanted; weight [padded - 3,
    columns]."""
    bits = 4 if learned_step else 8
    weight = weight_of(padded - 3, columns, clips=clips, bits=bits, padded=padded)
    y, mask = torch.randn(rows, columns), dropout_of(dropout)
    x = PLAIN[kind](y)
    x = x if mask is None else mask.apply(x)
    float_mode = mode == "float mode"
    operation = ProjectInputGradient(
        **upstream(mode, weight, rows),
        weight=Weight(format=weight_format_of(), values=weight.values)
        if float_mode
        else weight.bare(),
        x=None if float_mode else coded(x, bits=bits, learned_step=learned_step),
        nonlinearity=end_of(kind, mask, y, mode),
        accumulated=torch.randn(rows, columns) if accumulated else None,
        added=torch.randn(rows, columns) if added else None,
        dx=None if rounded else empty(rows, columns),
        rounded=gradient_to_round(rows, columns) if rounded else None,
        sum=empty(columns) if rest else None,
        dclip=empty(1) if rest else None,
    )
    return operation, y


def by_autograd(operation, y):
    """Gradients of y [M, K] and of the clip of x, in float64."""
    y = y.double().requires_grad_()
    clip = torch.full((1,), 1.2, dtype=torch.float64, requires_grad=True)
    end, weight = operation.nonlinearity or Nonlinearity(), operation.weight
    x = PLAIN[end.activation](y)
    if end.dropout is not None:
        x = x * end.dropout.apply(torch.ones(y.shape)).double()
    total = 0.0 * clip.sum()
    if operation.x is not None:
        bits, error = operation.x.format.bits, operation.x.error
        x = fake_quantize(x, clip, bits, "pact" if error is None else "lsq")
        given = operation.floats
        if operation.gradient is not None:
            codes, scale = operation.gradient.codes, operation.gradient.scale
            given = codes.double() * scale.double()[:, None] / weight.scale.double()
        matrix = weight.codes.double() * weight.scale.double()[:, None]
    else:
        given, matrix = operation.floats, weight.values.double()
    total = total + (x @ matrix.t() * given.double()).sum()
    if operation.accumulated is not None:
        total = total + (x * operation.accumulated.double()).sum()
    if operation.added is not None:
        total = total + (y * operation.added.double()).sum()
    return torch.autograd.grad(total, (y, clip))


def assert_is_autograds(found, y):
    exact, exact_clip = by_autograd(found, y)
    slack = 2e-6 * exact.abs().max() + 1e-5
    if found.nonlinearity and found.nonlinearity.slope is not None:  # off by up to half a step
        plain = on_reference(plain_of(found)).dx
        slack = slack + 0.51 / SLOPE_UNIT * plain.abs()
    assert ((found.dx - exact).abs() <= slack).all()
    factor = 1.0 if found.x is None else found.x.clip_factor
    assert (found.dclip - exact_clip).abs() <= 2e-6 * exact.abs().sum() * factor + 1e-6
    torch.testing.assert_close(found.sum, found.dx.double().sum(0).float(), atol=1e-4, rtol=1e-5)


def plain_of(operation):
    """The same without an activation and what is added."""
    end = Nonlinearity(dropout=operation.nonlinearity.dropout)
    written = {"dx": empty(*operation.dx.shape), "sum": empty(COLUMNS), "dclip": empty(1)}
    return dataclasses.replace(operation, nonlinearity=end, added=None, **written)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize(
    "rows, options",
    [
        (1, {}),
        (7, {"dropout": 0.3, "learned_step": True, "added": True, "clips": 1}),
        (341, {"dropout": 0.1, "added": True}),
        (41, {"learned_step": True, "clips": 1}),
        # another product accumulates before the mask
        (41, {"dropout": 0.2, "learned_step": True, "accumulated": True, "added": True}),
        (41, {"dropout": 0.2, "accumulated": True, "added": True}),
    ],
)
def test_gradients_are_autograds(mode, kind, rows, options):
    operation, y = case(rows, mode, kind=kind, **options)
    assert_is_autograds(compare(operation), y)


@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize(
    "mode, rows, columns",
    [
        *(("int8", *size) for size in ((41, COLUMNS), (9, 24), (BLOCK_ROWS + 3, 16))),
        *((mode, 41, COLUMNS) for mode in MODES[1:]),
    ],
)
def test_rounded_rows_are_the_references(kind, mode, rows, columns):
    options = {"dropout": 0.2, "added": True, "rounded": True, "columns": columns}
    compare(case(rows, mode, kind=kind, **options)[0], exact=mode == "int8")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2])
def test_neither_products_nor_threads_change_a_bit(way, threads):
    operation, _ = case(341, kind=Activation.relu, dropout=0.2, learned_step=True)
    assert_same_bits(operation, way, threads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one(mode, rounded, rows, compared):
    options = {"dropout": 0.1, "learned_step": True, "added": True, "rounded": rounded}
    found = compared(case(rows, mode, kind=Activation.relu, **options)[0])
    assert rows or (not found.sum.any() and not found.dclip.any())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("row", [0, 3, 69])
def test_a_row_that_is_not_finite_stays_alone(rounded, row, compared):
    operation, _ = case(70, kind=Activation.relu, dropout=0.2, added=True, rounded=rounded)
    operation.gradient.scale[row] = math.nan
    found = compared(operation, exact=True)
    if rounded:
        assert found.rounded.scale.isnan().nonzero().tolist() == [[row]]
        assert not found.rounded.codes[row].any()
    else:
        assert found.dx.isnan().any(1).nonzero().tolist() == [[row]]
    assert found.sum.isnan().any() and found.dclip.isnan()


@pytest.mark.parametrize("rounded", [False, True])
def test_results_that_nobody_wants(rounded, compared):
    operation, _ = case(41, kind=Activation.relu, rounded=rounded, rest=False)
    found = compared(operation, exact=True)
    assert found.sum is None and found.dclip is None


def test_padded_rows_of_the_weight_give_nothing():
    operation, _ = case(41)
    found = on_cpu(operation)
    operation.gradient.codes[:, OUTPUTS:] = 0
    assert torch.equal(found.dx, on_cpu(operation).dx)


def test_floats_or_codes():
    with refused("has dx and rounded; give it one of them"):
        ProjectInputGradient(weight=None, dx=torch.zeros(3, 16), rounded=torch.zeros(3, 16))


@pytest.mark.parametrize("learned_step", [False, True])
@pytest.mark.parametrize("tile", [None, SMALL])
def test_what_is_accumulated_may_lie_where_dx_goes(learned_step, tile, runs):
    operation, _ = case(41, learned_step=learned_step, accumulated=True)
    with gemm.ended_by(tile):
        wanted = [found.dx for found in runs(operation)]
        operation.dx = operation.accumulated = operation.accumulated.clone()
        assert all(map(torch.equal, (found.dx for found in runs(operation)), wanted))


HALF = torch.bfloat16
ENDS = [
    {"kind": Activation.none, "learned_step": True},
    {"kind": Activation.relu, "dropout": 0.3, "added": True},
    {"kind": Activation.gelu, "dropout": 0.1, "clips": 1},
    {"kind": Activation.gelu_tanh},
    {"kind": Activation.silu},
    {"kind": Activation.squared_relu, "dropout": 0.1},
    {"dropout": 0.3, "accumulated": True, "added": True},
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "mode, rounded, dtype",
    [
        *((mode, False, torch.float32) for mode in MODES),
        ("int8", True, torch.float32),
        *((mode, False, HALF) for mode in MODES[:2]),
    ],
)
def test_every_end_on_cuda(mode, rounded, dtype, end):
    """In half precision the product is one of float32 or of codes all the same."""
    operation, _ = case(41 if mode == "float mode" else 141, mode, rounded=rounded, **end)
    found = compare_ways(operation, dtype, exact=mode == "int8")
    if (mode, rounded, dtype) == ("int8", False, torch.float32):
        assert torch.equal(found.dx, on_cpu(operation).dx)


def test_a_weight_that_comes_transposed_on_cuda():
    """It is not transposed again."""
    operation, _ = case(41, kind=Activation.relu, rounded=True)
    expected = run(operation).rounded
    operation.weight.transposed = operation.weight.codes.t().contiguous()
    found = run(operation).rounded
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
    assert all(shape != operation.weight.transposed.shape for shape, _ in operation.cuda_scratch())


def test_rounded_rows_of_a_product_of_floats_on_cuda():
    """No activation is read or written but the gradient."""
    compare_cuda(case(41, "float", kind=Activation.relu, rounded=True)[0])


@pytest.mark.parametrize("rounded", [False, True])
def test_wide_rows_on_cuda(rounded):
    """More columns than a warp and a tile hold."""
    options = {"dropout": 0.2, "rounded": rounded, "columns": 1040}
    compare_ways(case(11, kind=Activation.relu, **options)[0], exact=True)


def turns(rows, columns, rounded):
    options = {"dropout": 0.1, "learned_step": True, "rounded": rounded, "columns": columns}
    in_one(case(rows, kind=Activation.relu, **options)[0], None)


def test_widths_that_kernels_cannot_take_on_cuda():
    with refused("multiple of 16"):
        run(case(7, columns=40)[0])
