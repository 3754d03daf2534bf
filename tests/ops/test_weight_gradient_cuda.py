"""ProjectWeightGradient on CUDA: transposed int8 operands or dequantised ones, in the emulator or
on a GPU."""

import math

import pytest
import torch

from lsq import gemm
from lsq.native.launch import Launch
from tests.ops.compare import by_row, on_cpu
from tests.ops.cuda import compare_cuda, in_dtype, run
from tests.ops.test_input_gradient import MODES
from tests.ops.test_input_gradient_cuda import HALF, few_blocks
from tests.ops.test_weight_gradient import case
from tests.ops.tiles import in_one


@pytest.fixture(autouse=True)
def products_by_themselves():
    """Kernels that make them as well: test_weight_gradient_product_cuda.py."""
    with gemm.ended_by(None):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips", [(1, False, None), (41, True, 1), (341, True, None)]
)
def test_every_mode(mode, rows, learned_step, clips):
    operation = case(rows, mode, learned_step=learned_step, clips=clips)
    found = compare_cuda(operation)
    if mode == "int8":
        assert torch.equal(found.dweight, on_cpu(operation).dweight)


@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("rows", [1, 41, 341])
def test_a_scale_for_each_row(mode, rows):
    operation = case(rows, mode, form=by_row)
    found = compare_cuda(operation)
    assert mode == "float" or torch.equal(found.dweight, on_cpu(operation).dweight)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_half_precision(mode):
    compare_cuda(case(41, mode), HALF)


@pytest.mark.parametrize("activations", [torch.float32, HALF])
def test_products_in_half_precision(activations):
    operation = case(41, "float", dtype="bfloat16")
    exact_of, found = (
        on_cpu(in_dtype(in_dtype(operation, HALF), torch.float32)),
        run(in_dtype(operation, activations)),
    )
    for name in ("dweight", "dclip"):
        one, exact = getattr(found, name), getattr(exact_of, name)
        assert (one - exact).norm() <= 0.01 * exact.norm(), name


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_wide_rows(mode):
    """More rows and columns than a warp and a tile hold."""
    compare_cuda(case(141, mode, learned_step=True, columns=1040, outputs=139, padded=144))


def test_launches():
    """Both operands of the int8 product, codes of one, the product, its end: nothing else."""
    operation = case(341)
    entries = operation.cuda(
        *(torch.empty(shape, dtype=dtype) for shape, dtype in operation.cuda_scratch())
    )
    assert [entry.kernel.name if isinstance(entry, Launch) else "product" for entry in entries] == [
        "lsq_begin_weight_gradient",
        "lsq_round_transposed",
        "product",
        "lsq_project_weight_gradient",
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", [None, 1])
def test_an_empty_batch(mode, clips):
    found = compare_cuda(case(0, mode, learned_step=True, clips=clips))
    assert not found.dweight.any() and (mode == "float mode" or not found.dclip.any())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_row_poisons_the_whole_gradient(value):
    operation = case(41)
    operation.gradient.scale[40] = value
    found = compare_cuda(operation)
    assert (
        found.dweight[operation.weight.values.abs() <= operation.weight.clip[:, None]].isnan().all()
    )


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_weight_that_is_nan(mode):
    operation = case(7, mode, learned_step=True)
    operation.weight.values[3, 5] = math.nan
    assert compare_cuda(operation).dclip.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("columns, outputs", [(48, 41), (1040, 11)])
def test_three_turns(columns, outputs, monkeypatch):
    few_blocks(monkeypatch)
    turns(columns, outputs)


def turns(columns, outputs):
    in_one(case(41, learned_step=True, columns=columns, outputs=outputs, padded=48), None)


def test_widths_that_kernels_cannot_take():
    with pytest.raises(ValueError, match="multiple of 16"):
        run(case(7, columns=40))
