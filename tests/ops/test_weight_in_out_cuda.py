"""Weights [inputs, outputs] on CUDA, in the emulator or on a GPU: their codes, products of floats,
their gradients."""

import dataclasses
import math

import pytest
import torch

from lsq.native import geometry
from lsq.native.launch import Launch
from lsq.ops.nonlinearity import Activation
from lsq.ops.rounding import RoundWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import by_row, empty, on_cpu
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_borders import in_out
from tests.ops.test_input_gradient import MODES
from tests.ops.test_input_gradient import case as input_gradient_case
from tests.ops.test_project import float_project
from tests.ops.test_weight_gradient import case


def rounding(values, clip, rows=None, *, bits=8, transposed=True):
    """Of values [K, N] to codes [P, K]."""
    inputs, outputs = values.shape
    form = WEIGHT_FORMATS["int8"](bits, Grain.ROW if len(clip) > 1 else Grain.TENSOR)
    rows = rows or outputs
    return RoundWeight(
        weight=Weight(
            format=form,
            values=values,
            clip=clip,
            in_out=True,
            scale=empty(rows),
            codes=empty(rows, inputs, dtype=torch.int8),
            transposed=empty(inputs, rows, dtype=torch.int8) if transposed else None,
        )
    )


def gradient(
    rows, mode="int8", *, learned_step=False, clips=None, columns=48, outputs=32, form=lambda x: x
):
    """Of a weight [K, N]."""
    plain = case(
        rows,
        mode,
        learned_step=learned_step,
        clips=clips,
        columns=columns,
        outputs=outputs,
        padded=outputs,
        form=form,
    )
    return dataclasses.replace(plain, weight=in_out(plain.weight), dweight=empty(columns, outputs))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize(
    "inputs, outputs, rows", [(16, 16, 16), (48, 32, 48), (144, 272, 272), (272, 144, 160)]
)
def test_codes_in_both_layouts(inputs, outputs, rows, per_output, bits):
    clip = 0.5 + torch.rand(outputs if per_output else 1)
    values = torch.randn(inputs, outputs)
    found = compare_cuda(rounding(values, clip, rows, bits=bits)).weight
    alone = compare_cuda(
        rounding(values, clip, rows, bits=bits, transposed=False), exact=True
    ).weight
    assert torch.equal(found.transposed, found.codes.t()) and torch.equal(found.codes, alone.codes)


@pytest.mark.parametrize("inputs, outputs, rows", [(16, 16, 16), (48, 32, 48), (272, 144, 160)])
def test_columns_under_their_largest_magnitudes(inputs, outputs, rows):
    for transposed in (False, True):
        operation = rounding(
            torch.randn(inputs, outputs), 0.5 + torch.rand(outputs), rows, transposed=transposed
        )
        operation.weight.values[:, 2] = 0.0
        operation.new_clip = empty(outputs)
        compare_cuda(operation, exact=not transposed)


@pytest.mark.parametrize("clips", [1, 48])
def test_nan_poisons_what_shares_its_clip(clips):
    values = torch.randn(144, 48)
    values[2, 3], values[143, 29], values[0, 30] = math.nan, math.nan, math.inf
    found = compare_cuda(rounding(values, torch.ones(clips), transposed=False), exact=True).weight
    assert found.scale.isnan().sum() == (2 if clips > 1 else 48)


@pytest.mark.parametrize("shape", [(40, 48), (48, 40)])
def test_sizes_that_no_kernel_takes(shape):
    with pytest.raises(ValueError, match="of a weight is 40.*multiple of 16"):
        compare_cuda(rounding(torch.randn(shape), torch.ones(1), transposed=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_floats(dtype):
    plain = float_project(41, 32, activation=Activation.relu)
    compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight)), dtype)


def test_a_product_of_floats_that_goes_back():
    plain, _ = input_gradient_case(41, "float mode", kind=Activation.gelu, added=True, padded=35)
    compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips",
    [(0, True, None), (1, False, None), (41, True, 1), (341, True, None)],
)
def test_gradients(mode, rows, learned_step, clips):
    operation = gradient(rows, mode, learned_step=learned_step, clips=clips)
    found = compare_cuda(operation)
    if learned_step and mode == "int8":
        operation.weight.transposed = operation.weight.codes.t().contiguous()
        assert torch.equal(compare_cuda(operation).dclip, found.dclip)
    if mode == "int8":
        assert torch.equal(found.dweight, on_cpu(operation).dweight)


def test_a_scale_for_each_row():
    operation = gradient(41, form=by_row)
    assert torch.equal(compare_cuda(operation).dweight, on_cpu(operation).dweight)


def test_three_turns(monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))
    turns()


def turns():
    """Three turns of each loop where two blocks stride; a NaN under a single clip."""
    values = torch.randn(48, 144)
    values[3, 5] = math.nan
    compare_cuda(rounding(values, torch.ones(1)))
    operation = rounding(torch.randn(48, 144), torch.ones(144))
    operation.new_clip = empty(144)
    compare_cuda(operation)
    for columns, outputs in ((80, 48), (16, 1040)):
        for clips in (None, 1):
            compare_cuda(
                gradient(
                    41, columns=columns, outputs=outputs, clips=clips, learned_step=clips is None
                )
            )


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_weight_that_is_nan(mode):
    operation = gradient(7, mode, learned_step=True)
    operation.weight.values[5, 3] = math.nan
    assert compare_cuda(operation).dclip.isnan().nonzero().tolist() == [[3]]


def test_codes_need_no_rows_behind_the_outputs():
    plain = case(7, outputs=24)
    with pytest.raises(ValueError, match="have 32 rows; on CUDA they must be its 24 outputs"):
        compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight), dweight=empty(48, 24)))


def test_launches():
    operation = gradient(341)
    entries = operation.cuda(
        *(torch.empty(shape, dtype=dtype) for shape, dtype in operation.cuda_scratch())
    )
    assert [entry.kernel.name if isinstance(entry, Launch) else "product" for entry in entries] == [
        "lsq_begin_weight_gradient",
        "lsq_round_transposed",
        "product",
        "lsq_weight_gradient_in_out",
        "lsq_finish_own_sums",
    ]
