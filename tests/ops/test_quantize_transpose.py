"""quantize_transpose: both layouts against the rounding of rows and columns, on the CPU and on CUDA."""

import math

import pytest
import torch

from lsq.ops import registry, rounding
from tests.ops import cuda
from tests.ops.compare import KEY, compare
from tests.ops.cuda import compare_cuda
from tests.ops.operands import ROWS

LAYOUTS = [
    {}, {"rows": False}, {"transposed": False}, {"shared_scale": True}, {"shared_scale": True, "rows": False},
]  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(rows, columns=48):
    return torch.randn(rows, columns), 0.5 + torch.rand(columns), KEY


def test_layouts_hold_rounded_rows_and_columns():
    x, factor, key = operands(41)
    found = compare("quantize_transpose", x, factor, key, stream=3, column_stream=4)
    codes, row_scale = rounding.round_rows(x, factor, key, 3)
    columns, column_scale = rounding.round_columns(x * factor, key, 4)
    padding = torch.zeros(48, 7, dtype=torch.int8)
    expected = codes, row_scale, torch.cat([columns.t(), padding], 1), column_scale
    for output, wanted in zip(found, expected, strict=True):
        assert torch.equal(output, wanted)
    *_, shared, none = compare("quantize_transpose", x, factor, key, stream=3, shared_scale=True)
    assert torch.equal(shared, torch.cat([codes.t(), padding], 1)) and none is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_on_cuda(rows, layout):
    compare_cuda("quantize_transpose", *operands(rows), exact=True, stream=3, column_stream=4, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_on_cuda(dtype, layout):
    x, _, key = operands(41)
    compare_cuda("quantize_transpose", x.to(dtype), None, key, dtype=dtype, exact=True, stream=3, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_rows_on_cuda(layout):
    """Wider than a warp and a tile."""
    compare_cuda("quantize_transpose", *operands(17, 1040), exact=True, stream=3, column_stream=4, **layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_scales_on_cuda(value, layout):
    x, factor, key = operands(41)
    x[40, 3] = value
    _, row_scale, _, column_scale = compare_cuda("quantize_transpose", x, factor, key, exact=True, **layout)
    assert row_scale is None or row_scale.isnan().nonzero().tolist() == [[40]]
    assert column_scale is None or column_scale.isnan().nonzero().tolist() == [[3]]


def test_vanishing_rows_and_columns_on_cuda():
    x, factor, key = operands(41)
    x[:, 5], x[7] = 0.0, 1e-38
    _, row_scale, _, column_scale = compare_cuda("quantize_transpose", x, factor, key, exact=True)
    assert row_scale[7] == 0 and column_scale[5] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_gives_zeros_on_cuda(layout):
    definition = registry.definition("quantize_transpose")
    shapes = [wanted if wanted is None else wanted[:0] if number < 2 else wanted
              for number, wanted in enumerate(definition.reference(*operands(1), **layout))]  # fmt: skip
    outputs = cuda.run(definition, operands(0), shapes, torch.float32, (), (), layout)
    assert not any(output.any() for output in outputs if output is not None)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="neither rows nor transposed"):
        compare("quantize_transpose", *operands(7), rows=False, transposed=False)
    with pytest.raises(ValueError, match="two layouts is 40.*multiple of 16"):
        compare_cuda("quantize_transpose", *operands(7, 40))
