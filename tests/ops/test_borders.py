"""What crosses a program's border: bfloat16 on the CPU, and weights [inputs, outputs]."""

import dataclasses
import math

import pytest
import torch

from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.rounding import Round, RoundGradient
from tests.ops.compare import by_row, compare, empty, gradient_to_round, on_cpu, refused, to_round
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_input_gradient import MODES, coded, upstream, weight_of
from tests.ops.test_input_gradient import case as input_case
from tests.ops.test_project import float_project, operands
from tests.ops.test_rounding import weight_of as rounded_weight
from tests.ops.test_weight_gradient import case
from tests.ops.tiles import launches, names

NARROW = torch.bfloat16
each_rows = pytest.mark.parametrize("rows", (1, 7, 341))


def same(found, expected) -> bool:
    pairs = zip(found.outputs, expected.outputs, strict=True)
    return all(torch.equal(one, other.to(one.dtype)) for one, other in pairs)


# bfloat16


@each_rows
def test_bfloat16_is_rounded_as_its_values(rows):
    x, to = torch.randn(rows, 48).bfloat16(), gradient_to_round(rows, 48)
    found = compare(Round(x=x, rounded=to_round(rows, 48, 1.2)))
    assert same(found, on_cpu(Round(x=x.float(), rounded=to_round(rows, 48, 1.2))))
    found = compare(RoundGradient(gradient=x, rounded=to, sum=empty(48)))
    assert same(found, on_cpu(RoundGradient(gradient=x.float(), rounded=to, sum=empty(48))))


@each_rows
def test_a_product_ends_in_bfloat16(rows):
    """What is not finite stays so."""
    fields = operands(rows)
    fields["bias"][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    found = on_cpu(Project(**fields, out=empty(rows, 32, dtype=NARROW))).out
    expected = on_cpu(Project(**fields, out=empty(rows, 32))).out.bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("learned_step", [False, True])
@each_rows
def test_the_gradient_of_an_input_ends_in_bfloat16(rows, learned_step):
    weight, x = weight_of(32), coded(torch.randn(rows, 48), learned_step=learned_step)
    fields = upstream("int8", weight, rows) | {"weight": weight.bare(), "x": x, "dclip": empty(1)}
    found = on_cpu(ProjectInputGradient(**fields, dx=empty(rows, 48, dtype=NARROW)))
    assert same(found, on_cpu(ProjectInputGradient(**fields, dx=empty(rows, 48))))


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize(
    "rows, learned_step, clips", [(7, False, None), (41, True, 1), (341, False, None)]
)
def test_the_gradient_of_a_weight_in_bfloat16_is_rounded_to_that(rows, learned_step, clips, in_out):
    plain = case(rows, "int8", learned_step=learned_step, clips=clips)
    values = plain.weight.values.bfloat16()
    values = values.t().contiguous() if in_out else values

    def ended(values):
        weight = dataclasses.replace(plain.weight, values=values, in_out=in_out)
        dweight, dclip = empty(*values.shape, dtype=values.dtype), empty(*plain.dclip.shape)
        return on_cpu(dataclasses.replace(plain, weight=weight, dweight=dweight, dclip=dclip))

    assert same(ended(values), ended(values.float()))


# Weights [inputs, outputs]


def in_out(operation):
    """Of the same weight, with its values transposed, and so is its gradient."""
    given, changed = operation.weight, {}
    if hasattr(operation, "dweight"):
        changed["dweight"] = empty(*operation.dweight.shape[::-1])
    weight = dataclasses.replace(given, values=given.values.t().contiguous(), in_out=True)
    return dataclasses.replace(operation, weight=weight, **changed)


def rounding(values, clip, rows=None, *, transposed=True, **options):
    """Of values [K, N] to codes [P, K]."""
    rows = rows or values.shape[1]
    return rounded_weight(values, clip, rows, in_out=True, transposed=transposed, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "inputs, outputs, padded, clips", [(48, 29, 32, 29), (130, 65, 80, 1), (16, 64, 64, 64)]
)
def test_codes_are_those_of_the_transpose_and_of_float32(inputs, outputs, padded, clips, dtype):
    values, clip = torch.randn(outputs, inputs).to(dtype), 0.8 + torch.rand(clips)
    values[outputs // 2, 3] = math.nan
    plain = compare(rounded_weight(values.float(), clip, padded)).weight
    for operation in (
        rounded_weight(values, clip, padded),
        rounding(values.t().contiguous(), clip, padded, transposed=False),
    ):
        found = compare(operation).weight
        assert torch.equal(found.codes, plain.codes)
        assert torch.equal(found.scale.nan_to_num(9), plain.scale.nan_to_num(9))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, learned_step, clips",
    [(1, False, None), (41, True, 1), (341, True, None), (64, False, None)],
)
def test_gradients_are_those_of_the_transpose(mode, rows, learned_step, clips):
    plain = case(rows, mode, learned_step=learned_step, clips=clips)
    found, expected = compare(in_out(plain)), on_cpu(plain)
    if mode == "float mode":
        torch.testing.assert_close(found.dweight, expected.dweight.t(), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found.dweight, expected.dweight.t())
        torch.testing.assert_close(found.dclip, expected.dclip, rtol=1e-4, atol=1e-4)


@each_rows
def test_products_of_floats_are_those_of_the_transpose(rows):
    back, _ = input_case(rows, "float mode", kind=Activation.gelu, added=True)
    for plain in (float_project(rows, activation=Activation.relu), back):
        for pair in zip(compare(in_out(plain)).outputs, on_cpu(plain).outputs, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_floats_on_cuda(dtype):
    compare_cuda(in_out(float_project(41, 32, activation=Activation.relu)), dtype)
    back, _ = input_case(41, "float mode", kind=Activation.gelu, added=True, padded=35)
    compare_cuda(in_out(back))


def gradient(rows, mode="int8", *, outputs=32, columns=48, **options):
    return in_out(case(rows, mode, columns=columns, outputs=outputs, padded=outputs, **options))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize(
    "inputs, outputs, rows", [(16, 16, 16), (48, 32, 48), (144, 272, 272), (272, 144, 160)]
)
def test_codes_in_both_layouts_on_cuda(inputs, outputs, rows, per_output, bits):
    clip = 0.5 + torch.rand(outputs if per_output else 1)
    values = torch.randn(inputs, outputs)
    found = compare_cuda(rounding(values, clip, rows, bits=bits)).weight
    alone = rounding(values, clip, rows, bits=bits, transposed=False)
    assert torch.equal(found.codes, compare_cuda(alone, exact=True).weight.codes)
    assert torch.equal(found.transposed, found.codes.t())


@pytest.mark.parametrize("inputs, outputs, rows", [(16, 16, 16), (48, 32, 48), (272, 144, 160)])
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_under_their_largest_magnitudes_on_cuda(inputs, outputs, rows, transposed):
    values, clip = torch.randn(inputs, outputs), 0.5 + torch.rand(outputs)
    values[:, 2] = 0.0
    operation = rounding(values, clip, rows, transposed=transposed, absmax=True)
    compare_cuda(operation, exact=not transposed)


@pytest.mark.parametrize("clips", [1, 48])
def test_nan_poisons_what_shares_its_clip_on_cuda(clips):
    values = torch.randn(144, 48)
    values[2, 3], values[143, 29], values[0, 30] = math.nan, math.nan, math.inf
    found = compare_cuda(rounding(values, torch.ones(clips), transposed=False), exact=True).weight
    assert found.scale.isnan().sum() == (2 if clips > 1 else 48)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rows, options",
    [
        (0, {"learned_step": True}),
        (1, {}),
        (41, {"learned_step": True, "clips": 1}),
        (341, {"learned_step": True}),
        (41, {"form": by_row}),
    ],
)
def test_gradients_on_cuda(mode, rows, options):
    operation = gradient(rows, mode, **options)
    found = compare_cuda(operation)
    if mode == "int8":
        assert torch.equal(found.dweight, on_cpu(operation).dweight)
        operation.weight.transposed = operation.weight.codes.t().contiguous()
        assert torch.equal(compare_cuda(operation).dclip, found.dclip)


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_a_weight_that_is_nan_on_cuda(mode):
    operation = gradient(7, mode, learned_step=True)
    operation.weight.values[5, 3] = math.nan
    assert compare_cuda(operation).dclip.isnan().nonzero().tolist() == [[3]]


def turns():
    """Three turns of each loop where two blocks stride; a NaN under a single clip."""
    values = torch.randn(48, 144)
    values[3, 5] = math.nan
    compare_cuda(rounding(values, torch.ones(1)))
    compare_cuda(rounding(torch.randn(48, 144), torch.ones(144), absmax=True))
    for columns, outputs in ((80, 48), (16, 1040)):
        sizes = {"columns": columns, "outputs": outputs}
        compare_cuda(gradient(41, learned_step=True, **sizes))
        compare_cuda(gradient(41, clips=1, **sizes))


def test_launches():
    assert names(launches(gradient(341), None)) == [
        "lsq_begin_weight_gradient",
        "lsq_round_transposed",
        "product",
        "lsq_weight_gradient_in_out",
        "lsq_finish_own_sums",
    ]


def test_what_kernels_do_not_take():
    for shape in ((40, 48), (48, 40)):
        with refused("of a weight is 40.*multiple of 16"):
            rounding(torch.randn(shape), torch.ones(1), transposed=False).cuda()
    with refused("have 32 rows; on CUDA they must be its 24 outputs"):
        launches(in_out(case(7, outputs=24)), None)
