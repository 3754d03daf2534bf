"""RoundTwoLayouts: both layouts against the rounding of rows and columns, on the CPU and on CUDA."""

import math

import pytest
import torch

from lsq.csrc.geometry import padded
from lsq.ops.two_layouts import RoundTwoLayouts
from lsq.quant import arithmetic
from tests.ops import cuda
from tests.ops.compare import KEY, ROWS, compare, empty
from tests.ops.cuda import DTYPES, compare_cuda

BOTH, COLUMNS, PLAIN, SHARED, SHARED_ALONE = LAYOUTS = [
    ("codes", "row_scale", "transposed", "column_scale"), ("transposed", "column_scale"), ("codes", "row_scale"),
    ("codes", "row_scale", "transposed"), ("row_scale", "transposed"),
]  # fmt: skip
"""What is written."""


def operation(rows, layout, columns=48) -> RoundTwoLayouts:
    made = {
        "codes": empty(rows, columns, dtype=torch.int8), "row_scale": empty(rows),
        "transposed": empty(columns, padded(rows), dtype=torch.int8), "column_scale": empty(columns),
    }  # fmt: skip
    return RoundTwoLayouts(
        x=torch.randn(rows, columns), weight_scale=0.5 + torch.rand(columns), key=KEY, subsequence=3,
        column_subsequence=4, **{name: made[name] for name in layout},
    )  # fmt: skip


def test_layouts_hold_rounded_rows_and_columns():
    given = operation(41, BOTH)
    found = compare(given)
    codes, row_scale = arithmetic.round_rows(given.x, given.weight_scale, KEY, 3)
    columns, column_scale = arithmetic.round_columns(given.x * given.weight_scale, KEY, 4)
    padding = torch.zeros(48, 7, dtype=torch.int8)
    assert torch.equal(found.codes, codes) and torch.equal(found.row_scale, row_scale)
    assert torch.equal(found.transposed, torch.cat([columns.t(), padding], 1))
    assert torch.equal(found.column_scale, column_scale)
    shared = operation(41, SHARED)
    shared.x, shared.weight_scale = given.x, given.weight_scale
    assert torch.equal(compare(shared).transposed, torch.cat([codes.t(), padding], 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_on_cuda(rows, layout):
    compare_cuda(operation(rows, layout), exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dtypes_on_cuda(dtype, layout):
    compare_cuda(operation(41, layout), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_rows_on_cuda(layout):
    """Wider than a warp and a tile."""
    compare_cuda(operation(17, layout, 1040), exact=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_scales_on_cuda(value, layout):
    given = operation(41, layout)
    given.x[40, 3] = value
    found = compare_cuda(given, exact=True)
    assert found.row_scale is None or found.row_scale.isnan().nonzero().tolist() == [[40]]
    assert found.column_scale is None or found.column_scale.isnan().nonzero().tolist() == [[3]]


def test_vanishing_rows_and_columns_on_cuda():
    given = operation(41, BOTH)
    given.x[:, 5], given.x[7] = 0.0, 1e-38
    found = compare_cuda(given, exact=True)
    assert found.row_scale[7] == 0 and found.column_scale[5] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_gives_zeros_on_cuda(layout):
    """Without a reference: PyTorch has no largest value of an empty column."""
    assert not any(tensor.any() for tensor in cuda.run(operation(0, layout)).outputs)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="neither codes nor transposed codes"):
        operation(7, ())
    with pytest.raises(ValueError, match="needs row_scale where"):
        operation(7, ("codes",))
    with pytest.raises(ValueError, match="two layouts is 40.*multiple of 16"):
        compare_cuda(operation(7, BOTH, 40))
