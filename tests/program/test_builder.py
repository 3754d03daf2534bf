"""The Builder: random numbers, weights, and what a backend asks for."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.ops.rounding import Add
from lsq.program.builder import Recorder
from lsq.program.parameters import Kind
from lsq.run.backends import backend
from lsq.run.cuda import CUDA, emulated_device
from tests.constants import quant_with
from tests.program.tiny import FLOAT, builder, project, rounded


def add(recorder: Recorder, a, b):
    """The sum of two tensors."""
    return recorder.add(Add(a=a, b=b, out=recorder.like("sum", a))).out


def test_taken_names_are_numbered():
    recorder = Recorder()
    assert [recorder.tensor("x", (1,)).name for _ in range(3)] == ["x", "x.2", "x.3"]
    assert recorder.input("x", (1,)).name == "x.4"


def test_a_tensor_like_another():
    recorder = Recorder()
    like = recorder.like("twin", recorder.tensor("codes", (3, 4), torch.int8))
    assert (like.name, like.shape, like.dtype, like.role) == (
        "twin",
        (3, 4),
        torch.int8,
        "temporary",
    )


def test_a_parameter_is_one_tensor_and_says_what_it_is():
    recorder = Recorder()
    table = recorder.parameter("table", (3, 4), Kind.TABLE, deviation=0.5)
    assert (
        recorder.parameter("table", (3, 4), Kind.TABLE, deviation=0.5) is table
        and table.role == "parameter"
    )
    assert (table.declared.name, table.declared.shape, table.declared.kind) == (
        "table",
        (3, 4),
        Kind.TABLE,
    )
    assert (table.declared.deviation, table.declared.start, table.declared.bound) == (0.5, 0.0, 0.0)


def test_operations_know_who_wrote_a_tensor():
    recorder = Recorder()
    x = recorder.input("x", (5, 4))
    assert isinstance(recorder.producer(add(recorder, x, x)), Add) and recorder.producer(x) is None


def test_what_stems_from_nothing_that_is_wanted_needs_no_gradient():
    recorder = Recorder(wanted={"table", "c"})
    a, b, c = (recorder.input(name, (5, 4)) for name in "abc")
    table = recorder.parameter("table", (5, 4), Kind.TABLE)
    needless = add(recorder, a, b)
    needed = add(recorder, needless, c)
    for tensor in (c, table, needed, add(recorder, needed, a)):
        assert recorder.needs_gradient(tensor), tensor
    for tensor in (a, b, needless, None):
        assert not recorder.needs_gradient(tensor), tensor


def test_everything_needs_a_gradient_unless_names_are_given():
    recorder = Recorder()
    x = recorder.input("x", (5, 4))
    assert recorder.needs_gradient(x) and recorder.needs_gradient(add(recorder, x, x))


INT8 = QuantConfig(backward="int8")


def test_subsequences_are_never_used_twice():
    b = builder()
    assert (
        len(
            {b.next_subsequence() for _ in range(5)}
            | {b.dropout(0.1).subsequence for _ in range(5)}
        )
        == 10
    )


def test_dropout_is_off_outside_training():
    assert builder(training=False).dropout(0.3) is None and builder().dropout(0.0) is None
    assert builder().dropout(0.3).probability == 0.3


# Weights and activations


@pytest.mark.parametrize("granularity, clips", [("channel", (3,)), ("tensor", (1,))])
def test_a_rounded_weight_declares_its_clip_and_brings_its_codes(granularity, clips):
    b = builder(quant_with(weight_granularity=granularity, weight_clip=0.7))
    weight = b.weight("weight", (3, 16), rows=16, bound=0.2)
    assert b.weight("weight", (3, 16)) is weight
    values, clip = weight.values.declared, weight.clip.declared
    assert (values.kind, values.shape, values.bound, values.clip) == (
        Kind.WEIGHT,
        (3, 16),
        0.2,
        "weight_clip",
    )
    assert (clip.name, clip.kind, clip.shape, clip.start) == (
        "weight_clip",
        Kind.WEIGHT_CLIP,
        clips,
        0.7,
    )
    assert (weight.codes.shape, weight.codes.dtype, weight.codes.role) == (
        (16, 16),
        torch.int8,
        "input",
    )
    assert (weight.scale.shape, weight.scale.role) == ((16,), "input")
    program = b.build()
    assert program.weights == {"weight": weight} and {weight.codes, weight.scale} <= {
        *program.inputs
    }


def test_a_weight_in_float_mode_has_values_alone():
    weight = builder().weight("weight", (3, 4))
    assert (
        weight.codes is weight.scale is weight.clip is None and weight.values.declared.clip is None
    )


@pytest.mark.parametrize(
    "options, kept", [({}, "clipped"), ({"clip_gradient": "lsq"}, "clipped error"), (None, "")]
)
def test_an_activation_keeps_what_its_gradient_needs(options, kept):
    b = builder(quant_with(activation_clip=3.0, **options or {}), backward=options is not None)
    coded = b.coded("x", (5, 3), "x_clip")
    assert (coded.codes.dtype, coded.scale.shape, coded.clip.declared.start) == (
        torch.int8,
        (1,),
        3.0,
    )
    assert coded.clip.declared.kind is Kind.ACTIVATION_CLIP
    assert [
        name for name in ("clipped", "error") if getattr(coded, name) is not None
    ] == kept.split()
    if kept:
        assert (coded.clipped.shape, coded.clipped.dtype) == ((2,), torch.uint8)


# Where it will run


def test_scratch_memory_is_what_the_backend_asks_for():
    programs = {}
    for name in ("cpu", "emulated", "reference"):
        where = backend(name)
        b = builder(INT8, where=where)
        b.output(project(b, rounded(b, b.input("x", (5, 16))), "weight", (16, 16)))
        programs[name] = b.build()
        for operation, scratch in zip(
            programs[name].operations, programs[name].scratch, strict=True
        ):
            assert [(one.shape, one.dtype) for one in scratch] == [
                (tuple(shape), dtype) for shape, dtype in where.scratch(operation)
            ]
    assert any(programs["cpu"].scratch) and not any(programs["reference"].scratch)


def test_activations_are_as_wide_as_the_backend_has_them():
    b = builder(INT8, where=CUDA(emulated_device(), activations=torch.bfloat16))
    y = project(
        b,
        rounded(b, b.input("x", (5, 16))),
        "weight",
        (16, 16),
        bias=b.parameter("bias", (16,), Kind.BIAS),
    )
    b.output(y)
    program = b.build()
    dtypes = {tensor.name: tensor.dtype for tensor in program.lifetimes}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        "x",
        "y",
        "d_x.codes",
        "d_y",
    }
    assert y.size == 2 * 5 * 16 and dtypes["d_bias"] == dtypes["d_weight"] == torch.float32
    assert builder(FLOAT).tensor("x", (1,)).dtype == torch.float32
