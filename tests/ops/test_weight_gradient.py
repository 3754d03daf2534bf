"""ProjectWeightGradient against autograd through a straight-through composite in float64, on the
CPU and on CUDA."""

import math

import pytest
import torch

from lsq.native import loader, tiles
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.values import Rows, Weight
from tests.ops.compare import (
    KEY,
    by_row,
    compare,
    empty,
    on_cpu,
    on_reference,
    refused,
    weight_format_of,
)
from tests.ops.cuda import compare_cuda, run
from tests.ops.products import WAYS, assert_same_bits, multiplied
from tests.ops.test_input_gradient import (
    COLUMNS,
    HALF,
    MODES,
    OUTPUTS,
    PADDED,
    by_themselves,
    coded,
    few_blocks,
    upstream,
    weight_of,
)
from tests.ops.tiles import in_one, launches, names
from tests.quant.fake import fake_quantize

BLOCK_ROWS = 4096


def case(
    rows,
    mode="int8",
    *,
    learned_step=False,
    clips=None,
    columns=COLUMNS,
    outputs=OUTPUTS,
    padded=PADDED,
    form=lambda x: x,
):
    """`form`: makes of the codes of x those that the operation reads."""
    bits = 4 if learned_step else 8
    weight = weight_of(outputs, columns, clips=clips, bits=bits, padded=padded)
    float_mode, x = mode == "float mode", torch.randn(rows, columns)
    return ProjectWeightGradient(
        **upstream(mode, weight, rows),
        x=Rows(floats=x) if float_mode else Rows(coded=form(coded(x))),
        weight=Weight(format=weight_format_of(), values=weight.values) if float_mode else weight,
        key=KEY if mode == "int8" else None,
        subsequence=5,
        learned_step=learned_step,
        dweight=empty(outputs, columns),
        dclip=None if float_mode else empty(*weight.clip.shape),
    )


def by_autograd(operation):
    """Gradients of the weight [N, K] and of its clip, in float64."""
    weight = operation.weight
    values = weight.values.double().requires_grad_()
    if weight.codes is None:
        return *torch.autograd.grad(
            (operation.x.floats.double() @ values.t() * operation.floats).sum(), values
        ), None
    clip, given = weight.clip.double().requires_grad_(), operation.floats
    if operation.gradient is not None:
        given = (
            operation.gradient.codes.double()
            * operation.gradient.scale.double()[:, None]
            / weight.scale.double()
        )
    rounded = fake_quantize(
        values, clip, weight.format.bits, "lsq" if operation.learned_step else "pact"
    )
    product = operation.x.coded.decode().double() @ rounded.t()
    return torch.autograd.grad((product * given[:, : len(values)].double()).sum(), (values, clip))


@pytest.mark.parametrize("mode", ["float", "float mode"])
@pytest.mark.parametrize(
    "rows, learned_step, clips", [(1, False, None), (7, True, 1), (41, True, None), (341, False, 1)]
)
@pytest.mark.parametrize("form", [lambda x: x, by_row])
def test_products_of_floats_are_autograds(mode, rows, learned_step, clips, form):
    operation = case(rows, mode, learned_step=learned_step, clips=clips, form=form)
    found = compare(operation)
    exact, exact_clip = by_autograd(operation)
    assert (found.dweight - exact).abs().max() <= 2e-6 * exact.abs().max() + 1e-5
    if mode == "float":
        assert found.dclip.shape == exact_clip.shape
        assert (found.dclip - exact_clip).abs().max() <= 2e-6 * exact_clip.abs().max() + 5e-5


@pytest.mark.parametrize("rows", [41, 341])
@pytest.mark.parametrize("learned_step, clips", [(False, None), (True, 1), (True, None)])
def test_int8_products_are_off_by_one_more_rounding(rows, learned_step, clips):
    operation = case(rows, learned_step=learned_step, clips=clips)
    found, expected = compare(operation), on_reference(operation)
    assert torch.equal(found.dweight, expected.dweight)
    exact, _ = by_autograd(operation)
    assert 0 < (found.dweight - exact).norm() < 0.02 * exact.norm()
    assert not found.dweight[operation.weight.values.abs() > operation.weight.clip[:, None]].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 41, 341])
def test_a_scale_for_each_row(rows, way):
    operation = case(rows, form=by_row)
    assert_same_bits(operation, way)
    found, expected = compare(operation), on_reference(operation)
    assert torch.equal(found.dweight, expected.dweight)
    exact, _ = by_autograd(operation)
    assert (found.dweight - exact).norm() < 0.02 * exact.norm()


def test_more_outputs_than_a_block():
    """The last block of sums holds rows of the weight, and rows that are only in its codes."""
    operation = case(3, columns=16, outputs=BLOCK_ROWS + 5, padded=BLOCK_ROWS + 16)
    assert torch.equal(compare(operation).dweight, on_reference(operation).dweight)


def test_the_rounding_has_no_bias():
    operation = case(41)
    exact, _ = by_autograd(operation)
    total = torch.zeros_like(exact)
    for subsequence in range(64):
        operation.subsequence = subsequence
        total += on_cpu(operation).dweight
    assert (total / 64 - exact).norm() < 0.004 * exact.norm()


@by_themselves
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", [None, 1])
def test_an_empty_batch(mode, clips, compared):
    found = compared(case(0, mode, learned_step=True, clips=clips))
    assert not found.dweight.any() and (mode == "float mode" or not found.dclip.any())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_row_poisons_the_whole_gradient(value):
    for operation in (case(41), case(41, form=by_row)):
        scale = operation.x.coded.scale if operation.x.coded.by_row else operation.gradient.scale
        scale[40] = value
        found = compare(operation)
        assert (
            found.dweight[operation.weight.values.abs() <= operation.weight.clip[:, None]]
            .isnan()
            .all()
        )


@by_themselves
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_weight_that_is_nan(mode, compared):
    operation = case(7, mode, learned_step=True)
    operation.weight.values[3, 5] = math.nan
    assert compared(operation).dclip.isnan().nonzero().tolist() == [[3]]


def test_rows_beyond_the_weight_do_not_count():
    operation = case(41)
    found = on_cpu(operation)
    operation.gradient.codes[:, OUTPUTS:] = 0
    again = on_cpu(operation)
    assert torch.equal(found.dweight, again.dweight) and torch.equal(found.dclip, again.dclip)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("learned_step", [False, True])
def test_no_way_to_multiply_changes_a_bit(way, learned_step):
    assert_same_bits(case(141, learned_step=learned_step, outputs=93, padded=96), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows, columns", [(1, 16), (64, 128), (67, 200)])
def test_tiles_are_rounded_like_rows(rows, columns, way):
    """Of rows and columns that fill tiles, and that do not."""
    assert_same_bits(case(rows, columns=columns), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_scale_that_is_not_finite_leaves_no_gradient(value, way):
    operation = case(67)
    operation.gradient.scale[66] = value
    with multiplied(*way):
        found = on_cpu(operation).dweight
    assert torch.equal(
        found.isnan(), operation.weight.values.abs() <= operation.weight.clip[:, None]
    )


@pytest.mark.parametrize("kernel", tiles.INSTRUCTIONS)
def test_tiles_do_not_pass_codes_of_rows(kernel, monkeypatch):
    """They round into the tiles: rounded codes in rows are for long products alone."""
    called, call = [], loader.call
    monkeypatch.setattr(
        loader, "call", lambda name, *arguments: (called.append(name), call(name, *arguments))
    )
    with multiplied(kernel):
        on_cpu(case(41))
    assert called and "lsq_round_columns" not in called


@by_themselves
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips", [(1, False, None), (41, True, 1), (341, True, None)]
)
def test_every_mode_on_cuda(mode, rows, learned_step, clips):
    operation = case(rows, mode, learned_step=learned_step, clips=clips)
    found = compare_cuda(operation)
    if mode == "int8":
        assert torch.equal(found.dweight, on_cpu(operation).dweight)


@by_themselves
@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("rows", [1, 41, 341])
def test_a_scale_for_each_row_on_cuda(mode, rows):
    operation = case(rows, mode, form=by_row)
    found = compare_cuda(operation)
    assert mode == "float" or torch.equal(found.dweight, on_cpu(operation).dweight)


@by_themselves
@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_half_precision_on_cuda(mode):
    compare_cuda(case(41, mode), HALF)


@by_themselves
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_wide_rows_on_cuda(mode):
    """More rows and columns than a warp and a tile hold."""
    compare_cuda(case(141, mode, learned_step=True, columns=1040, outputs=139, padded=144))


def test_launches():
    """Both operands of the int8 product, codes of one, the product, its end: nothing else."""
    assert names(launches(case(341), None)) == [
        "lsq_begin_weight_gradient",
        "lsq_round_transposed",
        "product",
        "lsq_project_weight_gradient",
    ]


@by_themselves
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_row_poisons_the_whole_gradient_on_cuda(value):
    operation = case(41)
    operation.gradient.scale[40] = value
    found = compare_cuda(operation)
    assert (
        found.dweight[operation.weight.values.abs() <= operation.weight.clip[:, None]].isnan().all()
    )


@by_themselves
@pytest.mark.parametrize("columns, outputs", [(48, 41), (1040, 11)])
def test_three_turns_on_cuda(columns, outputs, monkeypatch):
    few_blocks(monkeypatch)
    turns(columns, outputs)


def turns(columns, outputs):
    in_one(case(41, learned_step=True, columns=columns, outputs=outputs, padded=48), None)


def test_widths_that_kernels_cannot_take_on_cuda():
    with refused("multiple of 16"):
        run(case(7, columns=40))
