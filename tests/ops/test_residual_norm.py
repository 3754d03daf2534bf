"""bias_dropout_residual_layer_norm against torch's LayerNorm in float64, with every part left out in turn."""

import math

import pytest
import torch

from lsq.ops import random as philox_random
from lsq.ops.rounding import round_activation
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, assert_accurate, compare, compare_program, fused
from tests.ops.operands import KINDS, ROWS, clipped_bits, product_of

NAME = "bias_dropout_residual_layer_norm"
OPTIONS = {"dropout": 0.0, "stream": 2, "epsilon": 1e-5, "bits": 8}
BACKWARD = {"product": False, "dropout": 0.0, "stream": 2, "bits": 8}
COLUMNS = 48


def affine(columns=COLUMNS):
    """Weight and bias of a norm."""
    return 1 + 0.2 * torch.randn(columns), 0.2 * torch.randn(columns)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"clip_gradient": "lsq", "bits": 4}, {"backward": "int8"}, {"mode": "float"}
])
def test_in_a_program(rows, pre_norm, options):
    config = config_of(dropout=0.2, pre_norm=pre_norm, **options)
    seen = compare_program(layers.encoder_layer(config, 1, rows, False, True, True))
    assert {NAME, NAME + "_backward"} <= seen


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 3), (41, 48), (341, 1040)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_the_norm_is_as_accurate_as_torchs(rows, columns, offset):
    x, (weight, bias) = offset + torch.randn(rows, columns), affine(columns)
    z, mean, rstd, out, *_ = fused(NAME, None, None, None, x, weight, bias, None, KEY, **OPTIONS)
    assert torch.equal(z, x)

    def by_torch(dtype):
        return torch.nn.functional.layer_norm(x.to(dtype), (columns,), weight.to(dtype), bias.to(dtype))

    if columns > 1:
        assert_accurate(out, by_torch(torch.float64), by_torch(torch.float32))
    torch.testing.assert_close(mean, x.mean(1), atol=1e-6 * (1 + offset), rtol=1e-5)
    torch.testing.assert_close(rstd, (x.double().var(1, unbiased=False) + 1e-5).rsqrt().float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows, columns", [(1, 5), (7, 3), (41, 48), (341, 1040)])
def test_gradients_of_the_norm_are_as_accurate_as_torchs(rows, columns):
    x, (weight, bias) = torch.randn(rows, columns), affine(columns)
    upstream, direct = torch.randn(rows, columns), torch.randn(rows, columns)
    _, mean, rstd, *_ = fused(NAME, None, None, None, x, weight, bias, None, KEY, **OPTIONS)
    for dz in (None, direct):
        found = compare(
            NAME + "_backward", upstream, dz, x, mean, rstd, weight, *(None,) * 5, KEY, **BACKWARD
        )[:3]

        def by_autograd(dtype, dz=dz):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight, bias)]
            out = torch.nn.functional.layer_norm(leaves[0], (columns,), *leaves[1:])
            total = (out * upstream.to(dtype)).sum() + (0.0 if dz is None else (leaves[0] * dz.to(dtype)).sum())
            return torch.autograd.grad(total, leaves)

        exact, single = by_autograd(torch.float64), by_autograd(torch.float32)
        for name, *values in zip(("dx", "dweight", "dbias"), found, exact, single, strict=True):
            assert_accurate(*values, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("clip", [None, torch.tensor([1.6])])
def test_every_kind_of_product(kind, normed, clip):
    if clip is not None and not normed:
        return  # only a norm's result is rounded
    y, scale = product_of(kind, 41, COLUMNS)
    bias, residual = torch.randn(COLUMNS), torch.randn(41, COLUMNS)
    norm = affine() if normed else (None, None)
    options = OPTIONS | {"dropout": 0.3, "error": clip is not None}
    z, _, _, out, *rounded = compare(NAME, y, scale, bias, residual, *norm, clip, KEY, **options)
    added = philox_random.dropout((y if scale is None else y * scale) + bias, 0.3, KEY, 2)
    assert torch.equal(z, residual + added)
    assert (out is not None) == normed
    if clip is not None:
        for found, wanted in zip(rounded, round_activation(out, clip, bits=8, error=True), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["int8", None])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [7, 341])
def test_gradients_with_a_product(kind, normed, rounded, rows):
    """An int32 product (kind None) leaves nothing to read again: its gradient is only dropped out."""
    y, scale = product_of("int8", rows, COLUMNS) if kind else (None, None)
    clipped, error = (clipped_bits(y), torch.rand(rows, COLUMNS)) if kind else (None, None)
    x, dz = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    weight, bias = affine()
    _, mean, rstd, *_ = fused(NAME, None, None, None, x, weight, bias, None, KEY, **OPTIONS)
    norm = (torch.randn(rows, COLUMNS), dz, x, mean, rstd, weight) if normed else (None, dz, None, None, None, None)
    options = BACKWARD | {"product": True, "dropout": 0.3} | ({"gradient_stream": 7} if rounded else {})
    dresidual, _, _, dy, row_scale, dclip, _ = compare(
        NAME + "_backward", *norm, y, scale, clipped, error, torch.rand(COLUMNS) if rounded else None, KEY,
        unwanted=() if normed else (0,), **options,
    )
    if not rounded and not kind:
        dz = dresidual if normed else dz  # without a norm the gradient of the sum is that of the residual
        assert torch.equal(dy, philox_random.dropout(dz, 0.3, KEY, 2))
    assert (row_scale is not None) == rounded and (dclip is not None) == bool(kind)


@pytest.mark.parametrize("row", [0, 3, 6])
def test_nan_stays_in_its_row_and_poisons_the_scale(row):
    x, (weight, bias) = torch.randn(7, COLUMNS), affine()
    x[row, 5] = math.nan
    _, _, _, out, codes, scale, *_ = compare(NAME, None, None, None, x, weight, bias, torch.ones(1), KEY, **OPTIONS)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [row]
    assert scale.isnan() and not codes[row].any() and codes.any(1).sum() == 6


def test_a_constant_row():
    """Its variance is 0: epsilon keeps the result finite."""
    weight, bias = affine()
    out = fused(NAME, None, None, None, torch.full((3, COLUMNS), 7.0), weight, bias, None, KEY, **OPTIONS)[3]
    torch.testing.assert_close(out, bias.expand(3, -1))


def test_epsilon():
    x, (weight, bias) = 0.01 * torch.randn(7, COLUMNS), affine()
    out = fused(NAME, None, None, None, x, weight, bias, None, KEY, **(OPTIONS | {"epsilon": 0.1}))[3]
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (COLUMNS,), weight, bias, 0.1))
