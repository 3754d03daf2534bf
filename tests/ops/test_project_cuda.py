"""Project on CUDA: kernels and products in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq import gemm
from lsq.gemm.configuration import TileConfiguration
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from tests.ops.compare import ROWS, empty
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_project import float_project, operands, operands_by_row, rounded_project


@pytest.fixture(params=["one launch", "cuBLASLt and a kernel"])
def way(request):
    """Both ways to a product of codes and its end."""
    tile = TileConfiguration(rows=64, columns=64, stages=3)
    with gemm.ended_by(tile if request.param == "one launch" else None):
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "rows, outputs, bits", [*((rows, 32, 8) for rows in (0, *ROWS)), (41, 272, 3)]
)
def test_codes_are_exact(rows, outputs, bits):
    found = compare_cuda(rounded_project(rows, outputs, bits=bits), exact=True)
    assert torch.equal(found.rounded.scale, found.rounded.clip / found.rounded.largest)
    assert rows < 7 or found.rounded.clipped.any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_end_of_codes(activation, dropout, bias):
    compare_cuda(
        rounded_project(41, 48, activation, dropout, **({} if bias else {"bias": None})), exact=True
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation", [Activation.none, Activation.gelu])
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_a_scale_for_each_row_is_exact(activation, rows):
    compare_cuda(rounded_project(rows, 32, activation, **operands_by_row(rows)), exact=True)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 41])
@pytest.mark.parametrize("given", [operands, operands_by_row])
def test_floats_of_codes(dtype, rows, given):
    compare_cuda(Project(**given(rows), out=empty(rows, 32)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [0, 1, 41])
def test_products_of_floats(dtype, activation, rows):
    compare_cuda(float_project(rows, 48, activation, 0.3 if rows > 1 else 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_without_an_end(dtype):
    compare_cuda(float_project(41, 33, bias=None), dtype)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("poisoned", ["input", "weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_poisons_the_result(poisoned, value):
    """An infinite scale makes NaN of a sum of 0."""
    operation = rounded_project(41)
    operation.x.tensor[3] = 0
    (operation.x.scale if poisoned == "input" else operation.weight.scale)[0] = value
    assert compare_cuda(operation, exact=True).rounded.scale.isnan()


def test_widths_that_no_product_takes_are_refused():
    with pytest.raises(ValueError, match="inner width of an int8 product is 40.*multiple of 16"):
        compare_cuda(Project(**operands(7, inner=40), out=empty(7, 32)))
    with pytest.raises(ValueError, match="width of a product with an end is 33.*multiple of 8"):
        compare_cuda(float_project(7, 33))


def test_one_launch_without_scratch_or_a_product_and_its_end():
    operation = Project(**operands(41), out=empty(41, 32))
    assert [entry.kernel.name for entry in operation.cuda()] == [
        "lsq_project_product"
    ] and not operation.cuda_scratch()
    with gemm.ended_by(None):
        ((shape, dtype),) = operation.cuda_scratch()
        multiplied, end = operation.cuda(torch.empty(shape, dtype=dtype))
    assert (shape, dtype) == ((41, 32), torch.int32)
    assert multiplied.op == "project" and end.kernel.name == "lsq_end"
