"""bias_dropout_residual_layer_norm and its gradient on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.ops import registry
from tests.ops.compare import KEY, fused
from tests.ops.cuda import compare_cuda, run, widened
from tests.ops.operands import DTYPES, KINDS, clipped_bits, product_in

NAME = "bias_dropout_residual_layer_norm"
OPTIONS = {"dropout": 0.0, "stream": 2, "epsilon": 1e-5, "bits": 8}
CLIP = torch.tensor([1.6])
SHAPES = [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)]
FLOATS = (0, 3)
"""Outputs of the forward pass that are activations: z and the norm's result."""


def affine(columns=48):
    """Weight and bias of a norm."""
    return 1 + 0.2 * torch.randn(columns), 0.2 * torch.randn(columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout, bits", [(0.0, 8), (0.3, 4)])
def test_the_sum_of_every_kind_of_product(dtype, kind, dropout, bits):
    """z alone, then the norm of z as it was stored."""
    y, scale = product_in(dtype, kind, 41, 48)
    bias, residual = torch.randn(48), torch.randn(41, 48).to(dtype)
    options = OPTIONS | {"dropout": dropout, "bits": bits}
    z, *_ = compare_cuda(NAME, y, scale, bias, residual, None, None, None, KEY, dtype=dtype, floats=FLOATS, **options)
    compare_norm(z, dtype, bits, y=(y, scale, bias, residual), options=options)


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_a_norm_alone(rows, columns):
    compare_norm(torch.randn(rows, columns), torch.float32, 8)


def compare_norm(z, dtype, bits, y=None, options=OPTIONS):
    """The norm of z, from z or from what z is the sum of, is that of the reference and rounds alike."""
    weight, norm_bias = affine(z.shape[1])
    options = options | {"bits": bits}
    alone = NAME, None, None, None, z, weight, norm_bias, CLIP, KEY
    found = compare_cuda(*alone, dtype=dtype, floats=FLOATS, error=True, **options)
    compare_cuda(*alone, dtype=dtype, floats=FLOATS, unwanted=(0, 3, 7), **options)
    if y is None:
        return
    # The reference does not round z, so that its codes may differ where z is stored in half precision.
    inputs = (*y, weight, norm_bias, CLIP, KEY)
    if dtype == torch.float32:
        again = compare_cuda(NAME, *inputs, error=True, **options)
    else:
        again = on_cuda(NAME, inputs, dtype, FLOATS, error=True, **options)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


def on_cuda(name, inputs, dtype, floats, **attributes):
    """Outputs of the CUDA implementation alone."""
    definition = registry.definition(name)
    expected = definition.reference(*map(widened, inputs), **attributes)
    return run(definition, inputs, expected, dtype, floats, (), attributes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 6])
def test_what_is_not_finite_stays_in_its_row(value, row):
    x, (weight, bias) = torch.randn(7, 48), affine()
    x[row, 5] = value
    _, _, _, out, codes, scale, *_ = compare_cuda(
        NAME, None, None, None, x, weight, bias, torch.ones(1), KEY, **OPTIONS
    )
    assert out.isnan().any(1).nonzero().flatten().tolist() == [row]
    assert scale.isnan() and not codes[row].all() and codes.any(1).sum() >= 6


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_a_norm(rows, columns, direct):
    compare_gradients(torch.float32, rows, columns, direct=direct, product=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("clipped, error, dropout", [(False, False, 0.0), (True, False, 0.3), (True, True, 0.1)])
def test_gradients_with_a_product(dtype, normed, rounded, clipped, error, dropout):
    compare_gradients(dtype, 41, 48, normed, rounded, clipped, error, dropout)


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounded", [False, True])
def test_gradients_of_every_shape(rows, columns, rounded):
    compare_gradients(torch.float32, rows, columns, True, rounded, True, True, 0.1)


def compare_gradients(
    dtype, rows, columns, normed=True, rounded=False, clipped=False, error=False, dropout=0.0, direct=True, product=True
):
    dout, dz, z = (torch.randn(rows, columns).to(dtype) for _ in range(3))
    weight, bias = affine(columns)
    norm = [None] * 5
    if normed:
        _, mean, rstd, *_ = fused(NAME, None, None, None, z.float(), weight, bias, None, KEY, **OPTIONS)
        norm = [dout, z, mean, rstd, weight]
    y, scale = product_in(dtype, "int8", rows, columns)
    source = (
        y if clipped else None, scale if clipped else None, clipped_bits(y) if clipped else None,
        torch.rand(rows, columns) - 0.5 if error else None, 0.5 + torch.rand(columns) if rounded else None,
    )
    inputs = (norm[0], dz if direct else None, *norm[1:], *source, KEY)
    options = {"product": product, "dropout": dropout, "stream": 2, "bits": 8}
    options |= {"gradient_stream": 7} if rounded else {}
    floats, unwanted = (0,) if rounded else (0, 3), () if normed else (0,)
    if dtype == torch.float32 or not normed:
        return compare_cuda(NAME + "_backward", *inputs, dtype=dtype, floats=floats, unwanted=unwanted, **options)
    # What is handed to the product is the gradient as it was stored: compared with the reference on that alone.
    found = on_cuda(NAME + "_backward", inputs, dtype, floats, **options)
    norm_only = (*inputs[:6], *(None,) * 5, KEY)
    above = compare_cuda(NAME + "_backward", *norm_only, dtype=dtype, floats=(0,), **(options | {"product": False}))
    below = compare_cuda(
        NAME + "_backward", None, above[0], *(None,) * 4, *source, KEY, dtype=dtype, floats=floats, unwanted=(0,),
        **options,
    )
    for number, (one, other) in enumerate(zip(found, above[:3] + below[3:], strict=True)):
        if other is not None:
            assert torch.equal(one, other), f"output {number}"
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(value):
    dout, z, (weight, _) = torch.randn(7, 48), torch.randn(7, 48), affine()
    dout[3, 5] = value
    inputs = dout, None, z, torch.zeros(7), torch.ones(7), weight, *(None,) * 4, torch.ones(48), KEY
    dresidual, *_, row_scale, _, _ = compare_cuda(
        NAME + "_backward", *inputs, product=True, dropout=0.0, stream=2, bits=8, gradient_stream=7
    )
    assert not dresidual[3].isfinite().any() and row_scale.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(dtype):
    y, x, (weight, bias) = torch.empty(0, 48, dtype=torch.int8), torch.empty(0, 48, dtype=dtype), affine()
    *_, scale, _, _ = compare_cuda(
        NAME, y, torch.ones(1), bias, x, weight, bias, CLIP, KEY, dtype=dtype, floats=FLOATS, **OPTIONS
    )
    assert scale.item() == pytest.approx(1.6 / 127)
    none = torch.empty(0)
    found = compare_cuda(
        NAME + "_backward", x, x, x, none, none, weight, y, torch.ones(1), torch.empty(0, dtype=torch.uint8), None,
        None, KEY, dtype=dtype, floats=(0, 3), product=True, dropout=0.1, stream=2, bits=8,
    )
    for number in (1, 2, 5, 6):
        assert not found[number].any()


def test_nothing_to_do():
    """Without a norm and without a product, the gradient of z is the residual's."""
    found = compare_cuda(
        NAME + "_backward", None, torch.randn(7, 48), *(None,) * 9, KEY, unwanted=(0,),
        product=False, dropout=0.0, stream=2, bits=8,
    )
    assert not any(output is not None for output in found)


def test_activations_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="takes one dtype"):
        on_cuda(
            NAME, (torch.randn(7, 48).half(), None, torch.zeros(48), torch.randn(7, 48), None, None, None, KEY),
            torch.float32, FLOATS, **OPTIONS,
        )
