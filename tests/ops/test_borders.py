"""What crosses the border of a program as it is: bfloat16 on the CPU, and weights [inputs,
outputs], on the CPU and on CUDA."""

import dataclasses
import math

import pytest
import torch

from lsq.native import geometry
from lsq.native.launch import Launch
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.rounding import Round, RoundGradient, RoundWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import by_row, compare, empty, gradient_to_round, on_cpu, refused, to_round
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_input_gradient import MODES, coded, upstream, weight_of
from tests.ops.test_input_gradient import case as input_gradient_case
from tests.ops.test_project import float_project, operands
from tests.ops.test_weight_gradient import case

ROWS = (1, 7, 341)


def in_out(weight: Weight) -> Weight:
    """The same with its values transposed."""
    return dataclasses.replace(weight, values=weight.values.t().contiguous(), in_out=True)


def same(found, expected) -> bool:
    pairs = zip(found.outputs, expected.outputs, strict=True)
    return all(torch.equal(one, other.to(one.dtype)) for one, other in pairs)


@pytest.mark.parametrize("rows", ROWS)
def test_rounding_of_bfloat16_is_that_of_its_values(rows):
    x = torch.randn(rows, 48).bfloat16()
    found = compare(Round(x=x, rounded=to_round(rows, 48, 1.2)))
    assert same(found, on_cpu(Round(x=x.float(), rounded=to_round(rows, 48, 1.2))))


@pytest.mark.parametrize("rows", ROWS)
def test_gradients_in_bfloat16_are_rounded_as_their_values(rows):
    gradient, to = torch.randn(rows, 48).bfloat16(), gradient_to_round(rows, 48)
    found = compare(RoundGradient(gradient=gradient, rounded=to, sum=empty(48)))
    assert same(found, on_cpu(RoundGradient(gradient=gradient.float(), rounded=to, sum=empty(48))))


@pytest.mark.parametrize("rows", ROWS)
def test_a_product_ends_in_bfloat16(rows):
    fields = operands(rows)
    found = on_cpu(Project(**fields, out=empty(rows, 32, dtype=torch.bfloat16)))
    assert torch.equal(found.out, on_cpu(Project(**fields, out=empty(rows, 32))).out.bfloat16())


def test_what_is_not_finite_stays_so_in_bfloat16():
    fields = operands(7)
    fields["bias"][:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    found = on_cpu(Project(**fields, out=empty(7, 32, dtype=torch.bfloat16)))
    expected = on_cpu(Project(**fields, out=empty(7, 32))).out.bfloat16()
    torch.testing.assert_close(found.out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows, learned_step", [(7, False), (341, False), (41, True)])
def test_the_gradient_of_a_weight_ends_in_bfloat16(rows, learned_step):
    plain = case(rows, "int8", learned_step=learned_step)
    values = plain.weight.values.bfloat16()
    plain = dataclasses.replace(
        plain, weight=dataclasses.replace(plain.weight, values=values.float())
    )
    weight = dataclasses.replace(plain.weight, values=values)
    narrow = empty(*values.shape, dtype=torch.bfloat16)
    found, expected = (
        on_cpu(dataclasses.replace(plain, weight=weight, dweight=narrow)),
        on_cpu(plain),
    )
    assert torch.equal(found.dweight, expected.dweight.bfloat16())
    torch.testing.assert_close(found.dclip, expected.dclip, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learned_step", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_the_gradient_of_an_input_ends_in_bfloat16(rows, learned_step):
    weight = weight_of(32)
    fields = {
        **upstream("int8", weight, rows),
        "weight": weight.bare(),
        "x": coded(torch.randn(rows, 48), learned_step=learned_step),
        "dclip": empty(1),
    }
    found = on_cpu(ProjectInputGradient(**fields, dx=empty(rows, 48, dtype=torch.bfloat16)))
    expected = on_cpu(ProjectInputGradient(**fields, dx=empty(rows, 48)))
    assert torch.equal(found.dx, expected.dx.bfloat16()) and torch.equal(
        found.dclip, expected.dclip
    )


@pytest.mark.parametrize(
    "inputs, outputs, padded, clips", [(48, 29, 32, 29), (130, 65, 80, 1), (16, 64, 64, 64)]
)
def test_a_weight_in_out_has_the_codes_of_its_transpose(inputs, outputs, padded, clips):
    values, clip = torch.randn(outputs, inputs), 0.8 + torch.rand(clips)
    values[outputs // 2, 3] = float("nan")
    form = WEIGHT_FORMATS["int8"](8, Grain.ROW if clips > 1 else Grain.TENSOR)

    def rounded(**fields):
        codes = empty(padded, inputs, dtype=torch.int8)
        return compare(
            RoundWeight(
                weight=Weight(format=form, codes=codes, scale=empty(padded), clip=clip, **fields)
            )
        )

    found, expected = (rounded(values=values.t().contiguous(), in_out=True), rounded(values=values))
    assert torch.equal(found.weight.codes, expected.weight.codes)
    assert torch.equal(found.weight.scale.nan_to_num(9), expected.weight.scale.nan_to_num(9))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips",
    [(1, False, None), (41, True, 1), (341, True, None), (64, False, None)],
)
def test_the_gradient_of_a_weight_in_out_is_that_of_its_transpose(mode, rows, learned_step, clips):
    plain = case(rows, mode, learned_step=learned_step, clips=clips)
    outputs, inputs = plain.weight.values.shape
    found = compare(
        dataclasses.replace(plain, weight=in_out(plain.weight), dweight=empty(inputs, outputs))
    )
    expected = on_cpu(plain)
    if mode == "float mode":
        torch.testing.assert_close(found.dweight, expected.dweight.t(), rtol=1e-5, atol=1e-5)
        return
    assert torch.equal(found.dweight, expected.dweight.t())
    torch.testing.assert_close(found.dclip, expected.dclip, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
def test_products_of_floats_in_out_are_those_of_the_transpose(rows):
    project = float_project(rows, activation=Activation.relu)
    back, _ = input_gradient_case(rows, "float mode", kind=Activation.gelu, added=True)
    for plain in (project, back):
        found = compare(dataclasses.replace(plain, weight=in_out(plain.weight)))
        for one, other in zip(found.outputs, on_cpu(plain).outputs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("inputs, outputs, padded, clips", [(48, 29, 32, 29), (130, 65, 80, 1)])
def test_a_weight_in_bfloat16_has_the_codes_of_its_values(inputs, outputs, padded, clips, in_out):
    values, clip = torch.randn(inputs, outputs).bfloat16(), 0.8 + torch.rand(clips)
    values = values if in_out else values.t().contiguous()
    form = WEIGHT_FORMATS["int8"](8, Grain.ROW if clips > 1 else Grain.TENSOR)
    common = {"format": form, "clip": clip, "in_out": in_out}

    def rounded(values):
        codes = empty(padded, inputs, dtype=torch.int8)
        return compare(
            RoundWeight(weight=Weight(values=values, codes=codes, scale=empty(padded), **common))
        )

    assert same(rounded(values), rounded(values.float()))


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("rows, learned_step, clips", [(41, True, 1), (341, False, None)])
def test_the_gradient_of_a_weight_in_bfloat16_is_rounded_to_that(rows, learned_step, clips, in_out):
    plain = case(rows, "int8", learned_step=learned_step, clips=clips)
    values = plain.weight.values.bfloat16()
    values = values.t().contiguous() if in_out else values

    def ended(values):
        weight = dataclasses.replace(plain.weight, values=values, in_out=in_out)
        dweight = empty(*values.shape, dtype=values.dtype)
        return on_cpu(
            dataclasses.replace(
                plain, weight=weight, dweight=dweight, dclip=empty(*plain.dclip.shape)
            )
        )

    found, expected = ended(values), ended(values.float())
    assert torch.equal(found.dweight, expected.dweight.bfloat16()) and torch.equal(
        found.dclip, expected.dclip
    )


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
def test_codes_in_both_layouts_on_cuda(inputs, outputs, rows, per_output, bits):
    clip = 0.5 + torch.rand(outputs if per_output else 1)
    values = torch.randn(inputs, outputs)
    found = compare_cuda(rounding(values, clip, rows, bits=bits)).weight
    alone = compare_cuda(
        rounding(values, clip, rows, bits=bits, transposed=False), exact=True
    ).weight
    assert torch.equal(found.transposed, found.codes.t()) and torch.equal(found.codes, alone.codes)


@pytest.mark.parametrize("inputs, outputs, rows", [(16, 16, 16), (48, 32, 48), (272, 144, 160)])
def test_columns_under_their_largest_magnitudes_on_cuda(inputs, outputs, rows):
    for transposed in (False, True):
        operation = rounding(
            torch.randn(inputs, outputs), 0.5 + torch.rand(outputs), rows, transposed=transposed
        )
        operation.weight.values[:, 2] = 0.0
        operation.new_clip = empty(outputs)
        compare_cuda(operation, exact=not transposed)


@pytest.mark.parametrize("clips", [1, 48])
def test_nan_poisons_what_shares_its_clip_on_cuda(clips):
    values = torch.randn(144, 48)
    values[2, 3], values[143, 29], values[0, 30] = math.nan, math.nan, math.inf
    found = compare_cuda(rounding(values, torch.ones(clips), transposed=False), exact=True).weight
    assert found.scale.isnan().sum() == (2 if clips > 1 else 48)


@pytest.mark.parametrize("shape", [(40, 48), (48, 40)])
def test_sizes_that_no_kernel_takes_on_cuda(shape):
    with refused("of a weight is 40.*multiple of 16"):
        compare_cuda(rounding(torch.randn(shape), torch.ones(1), transposed=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_floats_on_cuda(dtype):
    plain = float_project(41, 32, activation=Activation.relu)
    compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight)), dtype)


def test_a_product_of_floats_that_goes_back_on_cuda():
    plain, _ = input_gradient_case(41, "float mode", kind=Activation.gelu, added=True, padded=35)
    compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips",
    [(0, True, None), (1, False, None), (41, True, 1), (341, True, None)],
)
def test_gradients_on_cuda(mode, rows, learned_step, clips):
    operation = gradient(rows, mode, learned_step=learned_step, clips=clips)
    found = compare_cuda(operation)
    if learned_step and mode == "int8":
        operation.weight.transposed = operation.weight.codes.t().contiguous()
        assert torch.equal(compare_cuda(operation).dclip, found.dclip)
    if mode == "int8":
        assert torch.equal(found.dweight, on_cpu(operation).dweight)


def test_a_scale_for_each_row_on_cuda():
    operation = gradient(41, form=by_row)
    assert torch.equal(compare_cuda(operation).dweight, on_cpu(operation).dweight)


def test_three_turns_on_cuda(monkeypatch):
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
def test_a_weight_that_is_nan_on_cuda(mode):
    operation = gradient(7, mode, learned_step=True)
    operation.weight.values[5, 3] = math.nan
    assert compare_cuda(operation).dclip.isnan().nonzero().tolist() == [[3]]


def test_codes_need_no_rows_behind_the_outputs_on_cuda():
    plain = case(7, outputs=24)
    with refused("have 32 rows; on CUDA they must be its 24 outputs"):
        compare_cuda(dataclasses.replace(plain, weight=in_out(plain.weight), dweight=empty(48, 24)))


def test_launches_on_cuda():
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
