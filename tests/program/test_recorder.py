"""The Recorder: names, declared parameters, who wrote a tensor and what needs a gradient."""

import torch

from lsq.ops.rounding import Add
from lsq.program.parameters import Kind
from lsq.program.recorder import Recorder


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
