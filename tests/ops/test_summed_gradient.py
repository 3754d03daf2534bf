"""A gradient with its sums: where a program puts it, what the reference writes, and what is left in
parts."""

import torch

from lsq.config import QuantConfig
from lsq.ops.summed_gradient import SummedGradient
from lsq.ops.sums import PartialSums
from lsq.program.parameters import Kind
from lsq.program.values import Rows
from tests.ops.compare import empty, gradient_to_round, rounded
from tests.program.tiny import builder, project
from tests.program.tiny import rounded as coded_in

ROWS, COLUMNS = 11, 24


def test_it_is_asked_for_as_the_product_wants_it():
    b = builder(QuantConfig(backward="int8", clips="learned"))
    bias = b.parameter("bias", (COLUMNS,), Kind.BIAS)
    x = coded_in(b, b.input("x", (ROWS, 16)))
    gradient = SummedGradient.of(
        Rows(coded=project(b, x, "weight", (COLUMNS, 16), bias=bias, clip="y_clip")), b
    )
    assert gradient.floats is None and gradient.rounded.codes.shape == (ROWS, COLUMNS)
    assert (gradient.sum.name, gradient.clip.name, gradient.parts) == ("d_bias", "d_y_clip", None)


def test_a_float_product_without_a_bias_wants_floats_alone():
    b = builder()
    gradient = SummedGradient.of(
        Rows(floats=project(b, b.input("x", (ROWS, 16)), "weight", (COLUMNS, 16))), b
    )
    assert gradient.floats.shape == (ROWS, COLUMNS)
    assert gradient.rounded is gradient.sum is gradient.clip is None


def test_what_the_reference_writes():
    given, coded = torch.randn(ROWS, COLUMNS), rounded(ROWS, COLUMNS)
    passed, clip = coded.straight_through(given)
    fields = {"rounded": gradient_to_round(ROWS, COLUMNS), "sum": empty(COLUMNS), "clip": empty(1)}
    gradient, codes, scale, total, of_clip, parts = SummedGradient(**fields).encode(given, coded)
    assert torch.equal(gradient, passed) and torch.equal(of_clip, clip) and parts is None
    assert torch.equal(total, passed.sum(dim=0)) and not torch.equal(passed, given)
    assert (codes.shape, scale.shape) == ((ROWS, COLUMNS), (ROWS,))


def test_sums_that_are_left_in_parts_come_to_the_same():
    given, coded = torch.randn(ROWS, COLUMNS), rounded(ROWS, COLUMNS)
    b = builder()
    names = {
        name: b.tensor(name, shape)
        for name, shape in (
            ("floats", (ROWS, COLUMNS)),
            ("sum", (COLUMNS,)),
            ("clip", (1,)),
        )
    }
    virtual = SummedGradient(**names)
    (left,) = virtual.leave_sums(b.tensor, ROWS, COLUMNS, coded)
    assert virtual.sum is virtual.clip is None and virtual.parts is left.parts
    assert (left.first, left.clip) == (names["sum"], names["clip"])
    fields = {"floats": empty(ROWS, COLUMNS)}
    total, clip = SummedGradient(**fields, sum=empty(COLUMNS), clip=empty(1)).encode(given, coded)[
        3:5
    ]
    parts = SummedGradient(**fields, parts=torch.empty(virtual.parts.shape)).encode(given, coded)[5]
    first, _, _, of_clip = PartialSums.of(
        parts, COLUMNS, (empty(COLUMNS),), empty(1), coded
    ).totals()
    assert torch.equal(first, total)
    torch.testing.assert_close(of_clip, clip.squeeze())


def test_sums_that_nobody_wants_are_not_left():
    b = builder()
    gradient = SummedGradient(floats=b.tensor("floats", (ROWS, COLUMNS)))
    assert gradient.leave_sums(b.tensor, ROWS, COLUMNS, None) == [] and gradient.parts is None
