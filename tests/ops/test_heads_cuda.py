"""split_heads, merge_heads and their gradients on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.ops.registry import definition
from tests.ops.compare import KEY
from tests.ops.cuda import compare_cuda, run
from tests.ops.operands import DTYPES, KINDS, clipped_bits, product_in

HEADS, WIDTH = 3, 16
SIZES = [(1, 1), (3, 7), (41, 1), (11, 31)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_split_of_every_kind_of_product(dtype, kind):
    compare_split(dtype, kind, 3, 3, 7)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("batch, time", SIZES)
def test_split(parts, batch, time):
    compare_split(torch.float32, "int8", parts, batch, time)


@pytest.mark.parametrize("dtype, parts, heads, width", [
    (torch.float32, 2, 4, 10), (torch.bfloat16, 2, 4, 10), (torch.float32, 1, 8, 130), (torch.float16, 1, 1, 1040)
])
def test_other_widths_of_heads(dtype, parts, heads, width):
    compare_split(dtype, "int8", parts, 3, 7, heads, width)
    compare_gradients(dtype, parts, 3, 7, heads, width)
    context = torch.randn(3, heads, 7, width).to(dtype)
    compare_cuda("merge_heads", context, torch.tensor([1.4]), dtype=dtype, exact=True, bits=8, error=False)
    rows, *_ = compare_cuda("merge_heads", context, None, dtype=dtype, floats=(0,), bits=8)
    (again,) = compare_cuda("merge_heads_backward", rows, dtype=dtype, floats=(0,), batch=3, heads=heads)
    assert torch.equal(again, context)


def compare_split(dtype, kind, parts, batch, time, heads=HEADS, width=WIDTH):
    y, scale = product_in(dtype, kind, batch * time, parts * heads * width)
    bias, floats = torch.randn(parts * heads * width), tuple(range(parts))
    options = {"batch": batch, "heads": heads, "parts": parts, "factor": 0.3, "bits": 8}
    compare_cuda("split_heads", y, scale, bias, dtype=dtype, floats=floats, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("clipped, error", [(False, False), (True, False), (True, True)])
def test_gradients_of_split(dtype, rounded, clipped, error):
    compare_gradients(dtype, 3, 3, 7, rounded=rounded, clipped=clipped, error=error)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("batch, time", SIZES)
def test_gradients_of_fewer_parts(parts, batch, time):
    compare_gradients(torch.float32, parts, batch, time, rounded=True, clipped=True)


def compare_gradients(
    dtype, parts, batch, time, heads=HEADS, width=WIDTH, rounded=False, clipped=False, error=False
):
    rows, columns = batch * time, parts * heads * width
    y, scale = product_in(dtype, "int8", rows, columns) if clipped else (None, None)
    gradients = [torch.randn(batch, heads, time, width).to(dtype) for _ in range(parts)]
    dy, *_ = compare_cuda(
        "split_heads_backward", *gradients, y, scale, clipped_bits(y) if clipped else None,
        torch.rand(rows, columns) - 0.5 if error else None, torch.rand(columns) if rounded else None,
        KEY if rounded else None, dtype=dtype, floats=() if rounded else (0,), exact=True,
        batch=batch, heads=heads, parts=parts, factor=0.3, bits=8, **({"gradient_stream": 5} if rounded else {}),
    )
    assert dy.dtype == (torch.int8 if rounded else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("batch, time", SIZES)
def test_merge(dtype, bits, batch, time):
    context = torch.randn(batch, HEADS, time, WIDTH).to(dtype)
    compare_cuda("merge_heads", context, torch.tensor([1.4]), dtype=dtype, exact=True, bits=bits, error=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_merge_carries_nan(value):
    context = torch.randn(3, HEADS, 7, WIDTH)
    context[1, 2, 3, 4] = value
    _, scale, *_ = compare_cuda("merge_heads", context, torch.tensor([1.0]), exact=True, unwanted=(2,), bits=8)
    assert scale.isnan().item() == math.isnan(value)


@pytest.mark.parametrize("batch, time", [(0, 7), (3, 0)])
def test_an_empty_batch(batch, time):
    """The reference knows no shapes of nothing, so that the outputs are named here."""
    columns, gradients = 3 * HEADS * WIDTH, [torch.empty(batch, HEADS, time, WIDTH)] * 3
    y, scale, none = torch.empty(0, columns, dtype=torch.int8), torch.ones(1), torch.empty(0, dtype=torch.uint8)
    options = {"batch": batch, "heads": HEADS, "parts": 3, "factor": 0.3, "bits": 8}

    def outputs_of(name, inputs, outputs, attributes):
        return run(definition(name), inputs, outputs, torch.float32, (), (), attributes)

    outputs_of("split_heads", (y, scale, torch.zeros(columns)), gradients, options)
    *_, dclip, dbias = outputs_of(
        "split_heads_backward", (*gradients, y, scale, none, None, None, None),
        (torch.empty(0, columns), None, torch.empty(1), torch.empty(columns)), options,
    )
    assert not dclip.any() and not dbias.any()
    outputs = y, torch.empty(1), none, None
    _, scale, *_ = outputs_of("merge_heads", (gradients[0], torch.ones(1)), outputs, {"bits": 8})
    assert scale.item() == pytest.approx(1 / 127)


def test_rows_that_are_no_whole_vectors_are_refused():
    with pytest.raises(ValueError, match="rows of 30 values.*multiple of 8"):
        compare_cuda("merge_heads", torch.randn(1, 3, 7, 10), None, bits=8)
