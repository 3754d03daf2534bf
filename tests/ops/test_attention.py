"""attention against PyTorch's in float64, forward and backward, with masks and extreme scores."""

import math

import pytest
import torch

from lsq.ops import random as philox_random
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, assert_accurate, compare, compare_program, fused

BATCH, HEADS, WIDTH = 3, 2, 16
PLAIN = {"causal": False, "dropout": 0.0, "stream": 4}


def heads(time, source=None, scale=1.0):
    """q, k, v with about unit scores."""
    source = source or time
    return tuple(scale * torch.randn(BATCH, HEADS, length, WIDTH) for length in (time, source, source))


def padding(source):
    """The first sentence is whole, the others end early."""
    return torch.arange(source) >= torch.tensor([source, max(1, source - 2), max(1, source // 2)])[:, None]


def plain_attention(q, k, v, mask, causal):
    """By torch; mask True where a key is padding."""
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    allowed = allowed.tril(k.shape[-2] - q.shape[-2]) if causal else allowed
    if mask is not None:
        allowed = allowed & ~mask[:, None, None, :]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, scale=1.0)


@pytest.mark.parametrize("time", [1, 7, 41])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_in_programs(time, dropout):
    config = config_of(dropout=dropout, activation="gelu")
    for program in (
        layers.self_attention(config, BATCH, time, time > 1, False, True, True),
        layers.self_attention(config, BATCH, time, False, True, True, True),
        layers.cross_attention(config, BATCH, time, 9, True, True, True),
    ):
        assert {"attention", "attention_backward"} <= compare_program(program)


@pytest.mark.parametrize("time, source", [(1, 1), (7, 7), (7, 9), (41, 41), (1, 341), (67, 5)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_as_accurate_as_torch(time, source, causal, masked):
    if causal and time != source:
        source = time
    tensors = heads(time, source)
    mask = padding(source) if masked else None
    upstream = torch.randn(BATCH, HEADS, time, WIDTH)

    def by_torch(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output = plain_attention(*leaves, mask, causal)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]

    options = PLAIN | {"causal": causal}
    found = [
        *compare("attention", *tensors, mask, KEY, **options),
        *compare("attention_backward", upstream, *tensors, mask, KEY, **options),
    ]
    exact, single = by_torch(torch.float64), by_torch(torch.float32)
    for name, *values in zip(("output", "dq", "dk", "dv"), found, exact, single, strict=True):
        assert_accurate(*values, name)


@pytest.mark.parametrize("time, source", [(5, 7), (41, 67)])
def test_dropout_drops_probabilities(time, source):
    q, k, v = heads(time, source)
    options = PLAIN | {"dropout": 0.3}
    (found,) = compare("attention", q, k, v, None, KEY, **options)
    probabilities = (q @ k.transpose(-1, -2)).softmax(-1)
    expected = philox_random.dropout(probabilities, 0.3, KEY, 4) @ v
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert (fused("attention", q, k, v, None, KEY, **(options | {"stream": 5}))[0] - found).abs().max() > 0.01


def test_gradients_with_dropout_equal_autograd():
    tensors = heads(7, 9)
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    q, k, v = leaves
    upstream = torch.randn(BATCH, HEADS, 7, WIDTH)
    output = philox_random.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.3, KEY, 4) @ v
    expected = torch.autograd.grad(output, leaves, upstream.double())
    found = compare("attention_backward", upstream, *tensors, None, KEY, **(PLAIN | {"dropout": 0.3}))
    for gradient, wanted in zip(found, expected, strict=True):
        assert (gradient - wanted).abs().max() < 1e-5


def test_masked_keys_do_not_matter():
    q, k, v = heads(7)
    mask = padding(7)
    (found,) = fused("attention", q, k, v, mask, KEY, **PLAIN)
    for tensor in (k, v):
        tensor.masked_fill_(mask[:, None, :, None], 1e3)
    assert torch.equal(fused("attention", q, k, v, mask, KEY, **PLAIN)[0], found)


def test_a_query_without_keys_gets_nan():
    q, k, v = heads(7)
    mask = torch.zeros(BATCH, 7, dtype=torch.bool)
    mask[1] = True
    (found,) = compare("attention", q, k, v, mask, KEY, **PLAIN)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_extreme_scores_do_not_overflow():
    q, k, v = heads(7, scale=100.0)
    (found,) = compare("attention", q, k, v, None, KEY, **PLAIN)
    assert found.isfinite().all()
    exact = plain_attention(q.double(), k.double(), v.double(), None, False)
    assert_accurate(found, exact, plain_attention(q, k, v, None, False))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_rows(value):
    q, k, v = heads(7)
    q[1, 0, 3, 2] = value
    (found,) = fused("attention", q, k, v, None, KEY, **PLAIN)
    bad = found.isnan().any(-1)
    assert bad[1, 0, 3] and bad.sum() == 1
    v[2, 1, 5, 0] = value
    (found,) = fused("attention", *heads(7)[:2], v, None, KEY, **PLAIN)
    assert not found[2, 1, :, 0].isfinite().any() and found[2, 0].isfinite().all()
