"""Sums over rows that operations leave in parts, and scales that are started first."""

import math

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.rounding import Add, Round
from lsq.ops.sums import (
    FinishSums,
    PartialSums,
    StartScales,
    SummedGradient,
    finish_together,
    start_together,
)
from lsq.ops.sums_cuda import gradient_sums
from lsq.program.tensor import Kind
from lsq.program.values import Rows, StartedScale
from lsq.run.backends import Reference
from tests.layers.examples import SENTENCES, SOURCE, mode_on
from tests.layers.examples import run as run_program
from tests.layers.shapes import config_of
from tests.ops.attentions import attention
from tests.ops.compare import by_row, empty, gradient_to_round, on_reference, rounded, to_round
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_input_gradient import case
from tests.ops.test_project import rounded_project
from tests.program.tiny import builder, project
from tests.program.tiny import rounded as coded_in

ROWS, COLUMNS = 11, 24


class Leaving(Reference):
    """The reference, with programs as a GPU has them."""

    leaves_sums = True


def parts(
    blocks: int, columns: int, sums: int, *, clip=True, factor: float = 1.0, clip_parts: int = 1
) -> PartialSums:
    """Of which the second sum, if any, is not wanted."""
    outs, given = [empty(columns), None, empty(columns)][:sums], empty(1) if clip else None
    values = torch.randn(blocks, sums * columns + clip_parts + 3)
    found = PartialSums.of(values, columns, outs, given, clip_parts=clip_parts)
    found.factor = factor
    return found


def test_totals():
    given = [
        parts(7, 24, 1, factor=0.5),
        parts(3, 16, 3, clip=False),
        parts(100, 0, 0, clip_parts=5),
    ]
    one, three, alone = on_reference(FinishSums(sums=given)).sums
    assert torch.equal(one.first, given[0].parts[:, :24].sum(dim=0))
    torch.testing.assert_close(one.clip, 0.5 * given[0].parts[:, 24:25].sum(dim=0))
    assert torch.equal(three.first, given[1].parts[:, :16].sum(dim=0)) and three.second is None
    assert torch.equal(three.third, given[1].parts[:, 32:48].sum(dim=0)) and three.clip is None
    torch.testing.assert_close(alone.clip, given[2].parts[:, :5].sum().view(1))


def test_many_kinds_at_once_on_cuda():
    """Few and many rows and columns, one sum to three, with a clip and without."""
    given = [
        parts(1, 16, 1),
        parts(256, 104, 3),
        parts(7, 40, 2, clip=False),
        parts(600, 0, 0, factor=0.5),
        parts(300, 24, 1, clip_parts=7),
    ]
    compare_cuda(FinishSums(sums=given))


@pytest.mark.parametrize(
    "options",
    [
        {"backward": "int8", "dropout": 0.1},
        {"clip_gradient": "lsq", "weight_granularity": "tensor"},
        {"norm": "rms", "pre_norm": True, "activation": "gelu"},
        {"mode": "float"},
    ],
)
def test_a_pass_is_finished_at_its_end(options):
    """Gradients are those of operations that finish their own sums."""
    given = config_of(**options), SENTENCES, SOURCE
    left, own = (programs.decoder_layer(*given, mode_on(one)) for one in (Leaving(), Reference()))
    names, count = [operation.name for operation in left.operations], len(own.operations)
    assert names[:count] == [operation.name for operation in own.operations]
    assert set(names[count:]) == {"FinishSums"} and "FinishSums" not in names[:count]
    found, expected = run_program(left, Leaving()), run_program(own, Reference())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_so_many_at_once():
    many = [case(7)[0] for _ in range(21)]
    found = finish_together(many, builder().tensor)
    assert [len(one.sums) for one in found] == [20, 1]
    assert all(one.sum is None and one.dclip is None and one.parts is not None for one in many)


def test_what_nobody_wants_is_not_left():
    b, (operation, _) = builder(), case(7)
    operation.sum = operation.dclip = None
    assert finish_together([operation], b.tensor) == [] and operation.parts is None
    gradient = SummedGradient(floats=b.tensor("floats", (ROWS, COLUMNS)))
    sums = gradient_sums(gradient, ROWS, COLUMNS, None)
    assert sums.leave(b.tensor) == [] and gradient.parts is None


def test_a_gradient_is_asked_for_as_the_product_wants_it():
    b = builder(QuantConfig(backward="int8", clips="learned"))
    bias = b.parameter("bias", (COLUMNS,), Kind.BIAS)
    x = coded_in(b, b.input("x", (ROWS, 16)))
    y = project(b, x, "weight", (COLUMNS, 16), bias=bias, clip="y_clip")
    gradient = SummedGradient.of(Rows(coded=y), b)
    assert gradient.floats is None and gradient.rounded.codes.shape == (ROWS, COLUMNS)
    assert (gradient.sum.name, gradient.clip.name, gradient.parts) == ("d_bias", "d_y_clip", None)
    b = builder()
    y = project(b, b.input("x", (ROWS, 16)), "weight", (COLUMNS, 16))
    gradient = SummedGradient.of(Rows(floats=y), b)
    assert gradient.floats.shape == (ROWS, COLUMNS)
    assert gradient.rounded is gradient.sum is gradient.clip is None


def test_what_the_reference_writes():
    given, coded = torch.randn(ROWS, COLUMNS), rounded(ROWS, COLUMNS)
    passed, clip = coded.straight_through(given)
    fields = {"rounded": gradient_to_round(ROWS, COLUMNS), "sum": empty(COLUMNS), "clip": empty(1)}
    results = SummedGradient(**fields).encode(given, coded)
    assert torch.equal(results["floats"], passed) and not torch.equal(passed, given)
    assert torch.equal(results["clip"], clip) and results["parts"] is None
    assert torch.equal(results["sum"], passed.sum(dim=0))
    shapes = {name: tensor.shape for name, tensor in results["rounded"].items()}
    assert shapes == {"codes": (ROWS, COLUMNS), "scale": (ROWS,)}


def test_sums_that_are_left_in_parts_come_to_the_same():
    given, coded, b = torch.randn(ROWS, COLUMNS), rounded(ROWS, COLUMNS), builder()
    shapes = {"floats": (ROWS, COLUMNS), "sum": (COLUMNS,), "clip": (1,)}
    wanted = {name: b.tensor(name, shape) for name, shape in shapes.items()}
    virtual = SummedGradient(**wanted)
    (left,) = gradient_sums(virtual, ROWS, COLUMNS, coded).leave(b.tensor)
    assert virtual.sum is virtual.clip is None and virtual.parts is left.parts
    assert (left.first, left.clip) == (wanted["sum"], wanted["clip"])
    fields = {"floats": empty(ROWS, COLUMNS)}
    whole = SummedGradient(**fields, sum=empty(COLUMNS), clip=empty(1)).encode(given, coded)
    left = SummedGradient(**fields, parts=torch.empty(virtual.parts.shape)).encode(given, coded)
    totals = PartialSums.of(left["parts"], COLUMNS, (empty(COLUMNS),), empty(1), coded).add_up()
    assert torch.equal(totals["first"], whole["sum"])
    torch.testing.assert_close(totals["clip"], whole["clip"].squeeze())


# Scales


def scales(clips) -> StartScales:
    """The operation that starts those of these clips, for 8 bits."""
    each = (torch.tensor([clip]) for clip in clips)
    scales = [StartedScale(clip=clip, scale=empty(1), largest=127.0) for clip in each]
    return StartScales(scales=scales)


def test_a_scale_is_the_clip_by_the_largest_code():
    found = on_reference(scales([127.0, 2.54]))
    assert [one.scale.item() for one in found.scales] == [1.0, torch.tensor(2.54).div(127).item()]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_all_scales_of_a_pass_on_cuda(count):
    compare_cuda(scales([0.5 + number for number in range(count)]))


def test_all_roundings_of_a_pass_are_started_together():
    """But for scales of rows, which are known later."""
    to = (to_round(3, 8, 0.5 + number, bits=4) for number in range(18))
    rounding = [Round(x=empty(3, 8), rounded=one) for one in to]
    later = Round(x=empty(3, 8), rounded=by_row(to_round(3, 8, 0.5)))
    first, second = start_together([*rounding, later, Add(a=empty(3), b=empty(3), out=empty(3))])
    made = (*first.scales, *second.scales)
    for one, scale in zip([each.rounded for each in rounding], made, strict=True):
        assert one.started and scale.scale is one.scale and scale.clip is one.clip
        assert scale.largest == 7.0
    assert [len(first.scales), len(second.scales)] == [16, 2] and start_together([later]) == []
    assert not later.rounded.started


def rounding(kind: str, value: float):
    """An operation that rounds the rows of several blocks, and `value` among what it reads."""
    if kind == "attention":
        forward = attention((80, 70), coded=False, to=to_round(150, 16, 0.8))
        forward.heads.q.rows.floats[140, 3] = value
        return forward
    if kind == "project":
        forward = rounded_project(600)
        forward.bias[5] = value
        return forward
    x, coded = torch.randn(600, 48), to_round(600, 48, 0.8)
    x[500, 3] = value
    if kind == "round":
        return Round(x=x, rounded=coded)
    weight, rstd = torch.randn(48), empty(600)
    return ResidualNorm(sum=ResidualSum(residual=x), weight=weight, rstd=rstd, rounded=coded)


@pytest.mark.parametrize("kind", ["round", "project", "attention", "norm"])
def test_a_scale_that_stands_there_is_changed_by_a_nan_alone_on_cuda(kind):
    for value in (0.5, math.nan):
        operation = rounding(kind, value)
        finished, given = run(operation).rounded, operation.rounded
        given.scale, given.started = torch.tensor([0.25]), True
        found = run(operation).rounded
        assert torch.equal(found.codes, finished.codes)
        assert found.scale.isnan() if math.isnan(value) else found.scale.item() == 0.25
