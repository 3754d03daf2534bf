"""What crosses the border of a program as it is: bfloat16 on the CPU, and weights [inputs,
outputs]."""

import dataclasses

import pytest
import torch

from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.rounding import Round, RoundGradient, RoundWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import compare, empty, gradient_to_round, on_cpu, to_round
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
