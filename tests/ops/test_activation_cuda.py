"""bias_activation_dropout and its gradient on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from tests.ops.compare import KEY
from tests.ops.cuda import compare_cuda
from tests.ops.operands import DTYPES, KINDS, clipped_bits, product_in

NAME = "bias_activation_dropout"
CLIP = torch.tensor([0.8])
SHAPES = [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation, rows, dropout, bits", [("relu", 7, 0.0, 8), ("gelu", 41, 0.3, 4)])
def test_every_kind_of_product(dtype, kind, activation, rows, dropout, bits):
    y, scale = product_in(dtype, kind, rows, 48)
    options = {"activation": activation, "dropout": dropout, "stream": 3, "bits": bits, "dtype": dtype}
    compare_cuda(NAME, y, scale, torch.randn(48), CLIP, KEY, error=True, exact=activation == "relu", **options)
    found, *_ = compare_cuda(NAME, y, scale, torch.randn(48), None, KEY, floats=(0,), **options)
    assert found.dtype == dtype


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_codes_are_those_of_the_cpu(rows, columns, activation):
    y, scale = product_in(torch.float32, "int8", rows, columns)
    compare_cuda(
        NAME, y, scale, torch.randn(columns), CLIP, KEY, exact=True, unwanted=(3,),
        activation=activation, dropout=0.1, stream=3, bits=8,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_what_is_not_finite(value, clip, activation):
    if activation == "gelu" and value == math.inf:
        return  # torch's own GELU makes NaN of it
    y = torch.randn(7, 48)
    y[3, 5] = value
    found, scale, *_ = compare_cuda(
        NAME, y, None, torch.zeros(48), clip, KEY, activation=activation, dropout=0.0, stream=1, bits=8
    )
    if math.isnan(value):
        assert (found.isnan().nonzero().tolist() == [[3, 5]]) if clip is None else scale.isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation, rounded, dropout", [("relu", True, 0.0), ("gelu", False, 0.2)])
def test_gradients_of_every_kind_of_product(dtype, kind, activation, rounded, dropout):
    compare_gradients(dtype, kind, 41, 48, activation, rounded, dropout, error=kind == "int8")


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_gradients(rows, columns, rounded, error):
    compare_gradients(torch.float32, "int8", rows, columns, "relu", rounded, 0.1, error)


def compare_gradients(dtype, kind, rows, columns, activation, rounded, dropout, error):
    y, scale = product_in(dtype, kind, rows, columns)
    dy, row_scale, dclip, _ = compare_cuda(
        NAME + "_backward", torch.randn(rows, columns).to(dtype), y, scale, clipped_bits(y) if kind == "int8" else None,
        torch.rand(rows, columns) - 0.5 if error else None, torch.randn(columns),
        0.5 + torch.rand(columns) if rounded else None, KEY, dtype=dtype, floats=() if rounded else (0,),
        exact=activation == "relu", activation=activation, dropout=dropout, stream=3, bits=8,
        **({"gradient_stream": 8} if rounded else {}),
    )
    assert dy.dtype == (torch.int8 if rounded else dtype)
    assert (row_scale is not None) == rounded and (dclip is not None) == (kind == "int8")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_gradient_that_is_not_finite(value, rounded):
    y, scale = product_in(torch.float32, "int8", 7, 48)
    gradient, bias = torch.randn(7, 48), torch.full((48,), 5.0)
    gradient[3, 5] = value
    _, row_scale, *_ = compare_cuda(
        NAME + "_backward", gradient, y, scale, torch.zeros(42, dtype=torch.uint8), None, bias,
        torch.ones(48) if rounded else None, KEY, activation="relu", dropout=0.0, stream=3, bits=8,
        **({"gradient_stream": 8} if rounded else {}),
    )
    if rounded:
        assert row_scale.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(dtype):
    y, scale, bias = torch.empty(0, 48, dtype=torch.int8), torch.ones(1), torch.randn(48)
    options = {"activation": "relu", "dropout": 0.1, "stream": 3, "bits": 8}
    _, found, *_ = compare_cuda(NAME, y, scale, bias, CLIP, KEY, dtype=dtype, **options)
    assert found.item() == pytest.approx(0.8 / 127)
    none = torch.empty(0, dtype=torch.uint8)
    *_, dclip, dbias = compare_cuda(
        NAME + "_backward", torch.empty(0, 48, dtype=dtype), y, scale, none, None, bias, None, KEY, dtype=dtype,
        floats=(0,), **options,
    )
    assert not dclip.any() and not dbias.any()


def test_a_width_that_no_vector_fits_is_refused():
    with pytest.raises(ValueError, match="rows of 41 values.*multiple of 8"):
        compare_cuda(
            NAME, torch.randn(7, 41), None, torch.zeros(41), None, KEY, activation="relu", dropout=0.0, stream=1, bits=8
        )
