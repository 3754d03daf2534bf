"""Sums over rows that operations leave in parts, and the operation that finishes those of a
pass."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.ops.sums import TOGETHER, FinishSums, PartialSums, SummedGradient, finish_together
from lsq.ops.sums_cuda import leave_gradient_sums
from lsq.program.tensor import Kind, VirtualTensor
from lsq.program.values import Rows
from lsq.run.backends import Reference
from tests.layers.examples import SENTENCES, SOURCE, mode_on, run
from tests.layers.shapes import config_of
from tests.ops.compare import empty, gradient_to_round, on_reference, rounded
from tests.ops.test_input_gradient import case
from tests.program.tiny import builder, project
from tests.program.tiny import rounded as coded_in


class Leaving(Reference):
    """The reference, with programs as a GPU has them."""

    leaves_sums = True


def parts(
    blocks: int,
    columns: int,
    sums: int,
    *,
    clip: bool = True,
    factor: float = 1.0,
    clip_parts: int = 1,
) -> PartialSums:
    """Of which the second sum, if any, is not wanted."""
    outs = [empty(columns), None, empty(columns)][:sums]
    width = sums * columns + clip_parts + 3
    found = PartialSums.of(
        torch.randn(blocks, width), columns, outs, empty(1) if clip else None, clip_parts=clip_parts
    )
    found.factor = factor
    return found


def virtual(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> VirtualTensor:
    """What a builder makes."""
    return VirtualTensor(name=name, shape=shape, dtype=dtype)


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
    """All gradients are what they are where each operation finishes its own sums."""
    config = config_of(**options)
    left, own = (
        programs.decoder_layer(config, SENTENCES, SOURCE, mode_on(where))
        for where in (Leaving(), Reference())
    )
    names = [operation.name for operation in left.operations]
    count = len(own.operations)
    assert names[:count] == [operation.name for operation in own.operations] and set(
        names[count:]
    ) == {"FinishSums"}
    found, expected = run(left, Leaving()), run(own, Reference())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_programs_for_the_cpu_have_none():
    program = programs.decoder_layer(config_of(), SENTENCES, SOURCE, mode_on("cpu"))
    assert not any(isinstance(operation, FinishSums) for operation in program.operations)


def test_so_many_at_once():
    many = [case(7)[0] for _ in range(TOGETHER + 1)]
    found = finish_together(many, virtual)
    assert [len(one.sums) for one in found] == [TOGETHER, 1]
    assert all(one.sum is None and one.dclip is None and one.parts is not None for one in many)


def test_what_nobody_wants_is_not_left():
    operation, _ = case(7)
    operation.sum = operation.dclip = None
    assert finish_together([operation], virtual) == [] and operation.parts is None


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
    results = SummedGradient(**fields).encode(given, coded)
    assert torch.equal(results["floats"], passed) and not torch.equal(passed, given)
    assert torch.equal(results["clip"], clip) and results["parts"] is None
    assert torch.equal(results["sum"], passed.sum(dim=0))
    shapes = {name: tensor.shape for name, tensor in results["rounded"].items()}
    assert shapes == {"codes": (ROWS, COLUMNS), "scale": (ROWS,)}


def test_sums_that_are_left_in_parts_come_to_the_same():
    given, coded = torch.randn(ROWS, COLUMNS), rounded(ROWS, COLUMNS)
    b = builder()
    names = {
        name: b.tensor(name, shape)
        for name, shape in (("floats", (ROWS, COLUMNS)), ("sum", (COLUMNS,)), ("clip", (1,)))
    }
    virtual = SummedGradient(**names)
    (left,) = leave_gradient_sums(virtual, b.tensor, ROWS, COLUMNS, coded)
    assert virtual.sum is virtual.clip is None and virtual.parts is left.parts
    assert (left.first, left.clip) == (names["sum"], names["clip"])
    fields = {"floats": empty(ROWS, COLUMNS)}
    whole = SummedGradient(**fields, sum=empty(COLUMNS), clip=empty(1)).encode(given, coded)
    left = SummedGradient(**fields, parts=torch.empty(virtual.parts.shape)).encode(given, coded)
    totals = PartialSums.of(left["parts"], COLUMNS, (empty(COLUMNS),), empty(1), coded).add_up()
    assert torch.equal(totals["first"], whole["sum"])
    torch.testing.assert_close(totals["clip"], whole["clip"].squeeze())


def test_sums_that_nobody_wants_are_not_left():
    b = builder()
    gradient = SummedGradient(floats=b.tensor("floats", (ROWS, COLUMNS)))
    assert (
        leave_gradient_sums(gradient, b.tensor, ROWS, COLUMNS, None) == []
        and gradient.parts is None
    )
