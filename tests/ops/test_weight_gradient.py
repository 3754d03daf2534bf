"""ProjectWeightGradient against autograd through a straight-through composite in float64."""

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
from tests.ops.cuda import run
from tests.ops.products import WAYS, assert_same_bits, multiplied
from tests.ops.test_input_gradient import (
    COLUMNS,
    HALF,
    MODES,
    OUTPUTS,
    PADDED,
    coded,
    upstream,
    weight_of,
)
from tests.ops.tiles import compare_ways, in_one
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
        total = (operation.x.floats.double() @ values.t() * operation.floats).sum()
        return *torch.autograd.grad(total, values), None
    clip, given = weight.clip.double().requires_grad_(), operation.floats
    if operation.gradient is not None:
        codes, scale = operation.gradient.codes.double(), operation.gradient.scale.double()
        given = codes * scale[:, None] / weight.scale.double()
    method = "lsq" if operation.learned_step else "pact"
    rounded = fake_quantize(values, clip, weight.format.bits, method)
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


def masked(operation):
    """Where the gradient goes through."""
    return operation.weight.values.abs() <= operation.weight.clip[:, None]


@pytest.mark.parametrize("rows", [41, 341])
@pytest.mark.parametrize("learned_step, clips", [(False, None), (True, 1), (True, None)])
@pytest.mark.parametrize("form", [lambda x: x, by_row])
def test_int8_products_are_off_by_one_more_rounding(rows, learned_step, clips, form):
    operation = case(rows, learned_step=learned_step, clips=clips, form=form)
    found = compare(operation)
    assert torch.equal(found.dweight, on_reference(operation).dweight)
    exact, _ = by_autograd(operation)
    assert 0 < (found.dweight - exact).norm() < 0.02 * exact.norm()
    assert not found.dweight[~masked(operation)].any()


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", [None, 1])
def test_an_empty_batch(mode, clips, compared):
    found = compared(case(0, mode, learned_step=True, clips=clips))
    assert not found.dweight.any() and (mode == "float mode" or not found.dclip.any())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("form", [lambda x: x, by_row])
def test_a_poisoned_row_poisons_the_whole_gradient(value, form, compared):
    operation = case(141, form=form)
    scale = operation.x.coded.scale if operation.x.coded.by_row else operation.gradient.scale
    scale[40] = value
    assert compared(operation).dweight[masked(operation)].isnan().all()


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
@pytest.mark.parametrize(
    "rows, options",
    [
        (141, {"outputs": 93, "padded": 96}),
        (141, {"outputs": 93, "padded": 96, "learned_step": True}),
        *((rows, {"form": by_row}) for rows in (1, 41, 341)),
        *((rows, {"columns": columns}) for rows, columns in ((1, 16), (64, 128), (67, 200))),
    ],
)
def test_no_way_to_multiply_changes_a_bit(way, rows, options):
    """Of rows and columns that fill tiles, and that do not."""
    assert_same_bits(case(rows, **options), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_scale_that_is_not_finite_leaves_no_gradient(value, way):
    operation = case(67)
    operation.gradient.scale[66] = value
    with multiplied(*way):
        assert torch.equal(on_cpu(operation).dweight.isnan(), masked(operation))


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


@pytest.mark.parametrize(
    "mode, dtype", [*((mode, torch.float32) for mode in MODES), *((mode, HALF) for mode in MODES)]
)
@pytest.mark.parametrize(
    "rows, options",
    [
        (1, {}),
        (41, {"learned_step": True, "clips": 1}),
        (341, {"learned_step": True}),
        (41, {"form": by_row}),
        # more rows and columns than a warp and a tile hold
        (141, {"learned_step": True, "columns": 528, "outputs": 139, "padded": 144}),
    ],
)
def test_every_mode_on_cuda(mode, dtype, rows, options):
    operation = case(rows, mode, **options)
    found = compare_ways(operation, dtype)
    if (mode, dtype) == ("int8", torch.float32):
        assert torch.equal(found.dweight, on_cpu(operation).dweight)


def turns(columns, outputs):
    in_one(case(41, learned_step=True, columns=columns, outputs=outputs, padded=48), None)


def test_widths_that_kernels_cannot_take_on_cuda():
    with refused("multiple of 16"):
        run(case(7, columns=40))
