"""attention on CUDA: kernels and products in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.ops import registry
from tests.ops.compare import KEY, compare
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_attention import PLAIN, padding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 9), (41, 41), (1, 341), (5, 66)]
"""T, S: rows held by 1 to 64 threads; lengths with and without gaps between rows."""


def heads(time, source, dtype=torch.float32, batch=3, count=2, width=16):
    """The gradient of the context, q, k, v with about unit scores."""
    sizes = (time, time, source, source)
    return [(width**-0.25 * torch.randn(batch, count, length, width)).to(dtype) for length in sizes]


def compare_both(gradient, q, k, v, mask, **options):
    """Compare attention and its backward pass; returns context, dq, dk, dv in float32, the last three in one tuple."""
    options = PLAIN | options
    if q.dtype == torch.float32:
        (context,) = compare_cuda("attention", q, k, v, mask, KEY, **options)
        return context, compare_cuda("attention_backward", gradient, q, k, v, mask, KEY, **options)
    # Probabilities and their gradients are rounded between the products, so errors are those of several roundings.
    for name, inputs in (("attention", (q, k, v)), ("attention_backward", (gradient, q, k, v))):
        definition = registry.definition(name)
        expected = definition.reference(*(tensor.float() for tensor in inputs), mask, KEY, **options)
        floats = tuple(range(len(expected)))
        found = [
            run(definition, (*inputs, mask, KEY), expected, q.dtype, floats, (), options, order=order, slots=order > 0)
            for order in (0, 1)
        ]
        for first, second, wanted in zip(*found, expected, strict=True):
            assert torch.equal(first, second)
            worst = (first.float() - wanted).abs().max()
            assert worst <= 2 * torch.finfo(q.dtype).eps * max(1.0, wanted.abs().max()), f"{name}: {worst}"
    return None


@pytest.mark.parametrize("time, source", SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("masked", [False, True])
def test_in_float32(time, source, dropout, masked):
    compare_both(*heads(time, source), padding(source) if masked else None, dropout=dropout)


@pytest.mark.parametrize("time", [7, 41, 66])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_causal(time, dropout):
    compare_both(*heads(time, time), padding(time), causal=True, dropout=dropout)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("time, source", [(7, 9), (1, 341)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_in_half_precision(time, source, dropout, dtype):
    compare_both(*heads(time, source, dtype), padding(source), dropout=dropout)


@pytest.mark.parametrize("source", [600, 1030, 4096])
def test_long_rows(source):
    """Rows that a block or a part of it shares, at one or two vectors a thread."""
    tensors = heads(2, source, batch=1, count=1, width=8)
    compare_both(*tensors, torch.arange(source)[None] >= source - 5, dropout=0.1)


def test_masks_of_a_row_that_no_word_fits():
    """Padding that begins at an address no multiple of 8, in rows of whole vectors."""
    mask = torch.zeros(3, 25, dtype=torch.bool)
    mask[:, ::3] = True
    compare_both(*heads(4, 25), mask)


def test_dropout_is_the_cpus():
    gradient, q, k, v = heads(5, 7)
    options = PLAIN | {"dropout": 0.5}
    (found,) = compare_cuda("attention", q, k, v, None, KEY, **options)
    (wanted,) = compare("attention", q, k, v, None, KEY, **options)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_query_without_keys_gets_nan():
    gradient, q, k, v = heads(7, 7)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[1] = True
    context, gradients = compare_both(gradient, q, k, v, mask)
    assert context[1].isnan().all() and context[[0, 2]].isfinite().all()
    assert gradients[0][[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value):
    gradient, q, k, v = heads(7, 9)
    q[1, 0, 3, 2] = value
    context, _ = compare_both(gradient, q, k, v, None, dropout=0.2)
    assert context.isnan().any(-1).sum() == 1


def test_extreme_scores_do_not_overflow():
    gradient, q, k, v = heads(7, 9)
    context, _ = compare_both(gradient, 100 * q, 100 * k, v, None)
    assert context.isfinite().all()


def test_an_empty_batch():
    compare_both(*heads(7, 9, batch=0), None)


def test_rows_that_no_block_can_hold_are_refused():
    gradient, q, k, v = (tensor.to("meta") for tensor in heads(1, 8200, batch=1, count=1))
    with pytest.raises(ValueError, match="attention over 8200 keys.*1 to 8192"):
        definition = registry.definition("attention")
        scores = torch.empty(1, 1, 8200, device="meta")
        definition.cuda(q, k, v, None, KEY, q, scores, **PLAIN)
