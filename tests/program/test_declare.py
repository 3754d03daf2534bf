"""Declared classes: defaults, tensors by direction, binding to real tensors, packing, and what is
refused."""

from __future__ import annotations

import dataclasses
import struct
from enum import IntEnum

import pytest
import torch

from lsq.native import declarations
from lsq.ops.calibration import LeastErrorClip
from lsq.ops.project import Project
from lsq.ops.residual_norm import ResidualNorm, ResidualNormGradient, ResidualSum
from lsq.ops.rounding import RoundWeight
from lsq.program.declare import (
    NOWHERE,
    Activations,
    Array,
    Codes,
    Floats,
    Host,
    In,
    Indices,
    Out,
    Value,
    address_words,
    extent,
    factor,
    size,
)
from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Dropout, RoundedGradient, Rows, Weight
from lsq.quant import GRADIENT, Grain, WeightFormat


class Mode(IntEnum):
    slow = 0
    fast = 3


class Grid(Value):
    """Tensors that go the way of their holder, and one that is read whatever the holder does."""

    codes: Codes
    scale: Floats | None
    limit: In[Floats] | None
    kind: Host[str]

    @factor
    def half(self) -> float:
        return 0.5


class Sample(Operation):
    x: In[Activations]
    factor: float = 1.0
    mode: Mode = Mode.slow
    grid: In[Grid] | None
    made: Out[Grid]
    out: Out[Floats] | None
    steps: int

    @size
    def rows(self) -> int:
        return self.x.shape[0]

    first = extent(0, "grid.codes", "x")
    results = extent(0, "out")


def grid(numel: int = 3) -> Grid:
    return Grid(
        codes=torch.zeros(numel, dtype=torch.int8),
        scale=torch.ones(1),
        limit=torch.ones(1),
        kind="grid",
    )


def sample(**fields) -> Sample:
    return Sample(**({"x": torch.randn(3, 2), "made": grid(), "steps": 7} | fields))


def test_what_may_be_missing_is_missing_unless_given():
    one = sample()
    assert one.grid is None and one.out is None and one.factor == 1.0 and one.mode is Mode.slow
    with pytest.raises(TypeError, match="steps"):
        Sample(x=torch.randn(3, 2), made=grid())
    with pytest.raises(TypeError, match="unknown"):
        sample(unknown=1)


def test_sizes_are_read_off_the_first_tensor_that_is_there():
    one = sample()
    assert (one.first, one.results, one.rows) == (3, 0, 3)
    assert one.bind(lambda tensor: tensor[:2]).rows == 2
    one.grid, one.out = grid(7), torch.ones(5)
    assert (one.first, one.results) == (7, 5)


def test_leaves_say_who_writes_what():
    leaves = {leaf.name: (leaf.kind, leaf.written, leaf.optional) for leaf in Sample.leaves()}
    assert leaves == {
        "x": ("Activations", False, False),
        "grid.codes": ("Codes", False, True),
        "grid.scale": ("Floats", False, True),
        "grid.limit": ("Floats", False, True),
        "made.codes": ("Codes", True, False),
        "made.scale": ("Floats", True, True),
        "made.limit": ("Floats", False, True),
        "out": ("Floats", True, True),
    }
    one = sample()
    found = {leaf.name: leaf.of(one) for leaf in Sample.leaves()}
    assert (
        found["grid.codes"] is None
        and found["out"] is None
        and found["made.codes"] is one.made.codes
    )


def test_rounding_writes_codes_and_reads_clips():
    written = {leaf.name for leaf in ResidualNorm.leaves() if leaf.written}
    assert {
        "sum.z",
        "rounded.codes",
        "rounded.scale",
        "rounded.clipped",
        "rounded.error",
    } <= written
    assert not {"rounded.clip", "sum.dropout.key", "sum.update"} & written
    written = {leaf.name for leaf in ResidualNormGradient.leaves() if leaf.written}
    assert {"sum.rounded.codes", "sum.rounded.scale"} <= written
    assert not {"sum.rounded.weight_scale", "sum.rounded.key"} & written


def test_binding_resolves_every_tensor_and_keeps_the_rest():
    one = sample(
        x=VirtualTensor(name="x", shape=(3, 2)),
        out=VirtualTensor(name="out", shape=(5,)),
        mode=Mode.fast,
        made=Grid(codes=VirtualTensor(name="codes", shape=(3,), dtype=torch.int8), kind="coarse"),
    )
    assert one.rows == 3
    bound = one.bind(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    assert type(bound) is Sample and isinstance(one.x, VirtualTensor)
    assert (
        bound.x.shape == (3, 2) and bound.out.shape == (5,) and bound.made.codes.dtype == torch.int8
    )
    assert bound.grid is None and bound.made.scale is None
    assert (bound.made.kind, bound.mode, bound.steps, bound.rows) == ("coarse", Mode.fast, 7, 3)


def test_the_words_of_a_struct_that_are_addresses():
    for one in (sample(grid=grid(), out=torch.zeros(5)), sample(factor=0.5)):
        leaves = {leaf.path: leaf.of(one) for leaf in Sample.leaves()}
        found = {path: one.packed[word] for path, word in address_words(Sample).items()}
        assert found == {
            path: 0 if tensor is None else tensor.data_ptr() for path, tensor in leaves.items()
        }


def test_a_struct_holds_addresses_numbers_and_nulls():
    one = sample(mode=Mode.fast, factor=0.25)
    x, made = one.x.data_ptr(), one.made
    held = struct.unpack("PfqPPPf4xPPPf4xPqqqq", one.pack())
    pointers = made.codes.data_ptr(), made.scale.data_ptr(), made.limit.data_ptr()
    assert held == (x, 0.25, 3, 0, 0, 0, 0.0, *pointers, 0.5, 0, 7, 3, 3, 0)
    again = struct.unpack(
        "PfqPPPf4xPPPf4xPqqqq", sample(grid=grid(), x=one.x).pack(lambda tensor: tensor.numel())
    )
    assert again == (6, 1.0, 0, 3, 1, 1, 0.5, 3, 1, 1, 0.5, 0, 7, 3, 3, 0)


def test_a_struct_is_as_long_as_the_header_says():
    gradient = RoundedGradient(
        format=GRADIENT,
        codes=torch.zeros(3, 2, dtype=torch.int8),
        scale=torch.ones(3),
        weight_scale=torch.ones(2),
        key=torch.zeros(1, dtype=torch.int64),
        subsequence=1,
    )
    dropout = Dropout(key=gradient.key, subsequence=2, probability=0.5)
    ones = torch.ones(3, 2)
    norm = ResidualNorm(sum=ResidualSum(residual=ones, update=ones, dropout=dropout, z=ones))
    for one in (gradient, dropout, norm.sum, norm):
        assert len(one.pack()) == declarations.layout(type(one).__name__)[0]


def test_a_tensor_without_elements_is_not_missing():
    x, *_ = struct.unpack_from("P", sample(x=torch.empty(0, 2)).pack())
    assert x == NOWHERE


FLOATS = "it must be a contiguous tensor of torch.float32 or torch.bfloat16$"
EMPTY = Grid(codes=None, kind="empty")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"x": None}, f"^Sample.x is None; {FLOATS}"),
        ({"made": EMPTY}, "^Sample: Grid.codes is None; it must be a .* tensor of torch.int8$"),
        ({"made": None}, "^Sample.made is None; it must be a Grid$"),
        ({"steps": None}, "^Sample.steps is None; it must be a int$"),
        ({"x": torch.zeros(3, 2).double()}, "^Sample.x is torch.float64"),
        ({"x": torch.zeros(2, 3).t()}, r"^Sample.x is torch.float32 with strides \(1, 3\)"),
        ({"x": VirtualTensor(name="x", shape=(3, 2))}, "^Sample.x is x float32"),
        ({"out": torch.zeros(1, dtype=torch.bfloat16)}, "^Sample.out is torch.bfloat16"),
    ],
)
def test_what_is_missing_or_another_tensor_is_named(fields, message):
    sample(x=torch.zeros(3, 2, dtype=torch.bfloat16)).pack()  # activations may be half as large
    with pytest.raises(ValueError, match=message):
        sample(**fields).pack()


def test_a_tensor_of_a_value_is_named_with_its_holder():
    made = Coded(format=None, codes=torch.zeros(3), scale=torch.ones(1))
    message = "^ResidualNorm: Coded.codes is torch.float32 .* tensor of torch.int8$"
    with pytest.raises(ValueError, match=message):
        ResidualNorm(sum=ResidualSum(residual=torch.ones(3, 2)), rounded=made).pack()


def test_a_declaration_that_cannot_be_is_refused_where_it_is_made():
    with pytest.raises(ValueError, match="Wrong.x is of kind Tensor; allowed: Activations, "):

        class Wrong(Operation):
            x: In[Tensor]  # noqa: F821

    with pytest.raises(
        ValueError, match=r"Unsaid.tokens belongs to an operation: write In\[Indices\] or Out"
    ):

        class Unsaid(Operation):
            tokens: Indices


@pytest.mark.parametrize(
    "annotations, members, hidden",
    [
        ({"inputs": "In[Floats]"}, {}, "Operation.inputs"),
        ({"name": "Host[str]"}, {}, "Operation.name"),
        ({"outputs": "Out[Floats] | None"}, {}, "Operation.outputs"),
        ({"limits": "int"}, {}, "Operation.limits"),
        ({}, {"cpu": size(lambda self: 1)}, "Operation.cpu"),
        ({}, {"pack": factor(lambda self: 1.0)}, "Operation.pack"),
        ({"pack": "Floats"}, {}, "Value.pack"),
    ],
)
def test_what_would_hide_an_attribute_is_refused(annotations, members, hidden):
    base, name = hidden.split(".")
    members = {"__annotations__": annotations, "__module__": __name__, **members}
    message = f"^Hiding.{name} would hide {hidden}; call it something"
    with pytest.raises(ValueError, match=message):
        type("Hiding", (Operation if base == "Operation" else Value,), members)


def clip_search(rows=6, columns=8, clips=6, **options):
    clip, unusable = torch.empty(clips), torch.empty(rows, dtype=torch.int64)
    return LeastErrorClip(x=torch.randn(rows, columns), clip=clip, unusable=unusable, **options)


def test_tensors_of_other_shapes_than_stated_are_refused():
    clip_search().pack()
    with pytest.raises(
        ValueError, match=r"LeastErrorClip\.unusable is \[6\]; it must be \[R\], .*clip \[5\]"
    ):
        clip_search(clips=5).pack()
    with pytest.raises(ValueError, match=r"LeastErrorClip\.clip is \[6\]; .*before \[5\]"):
        clip_search(before=torch.ones(5)).pack()


def test_of_several_stated_shapes_one_fits():
    clip_search(rows=8, columns=6, clips=8, by_columns=False).pack()
    turned = clip_search(rows=6)
    turned.x, turned.by_columns = turned.x.t().contiguous(), True
    turned.pack()
    turned.x = torch.randn(7, 7)
    with pytest.raises(ValueError, match=r"x is \[7, 7\]; it must be \[R, N\] or \[N, R\]"):
        turned.pack()


def test_shapes_of_values_are_those_of_their_holders():
    form = WeightFormat(name="int8", bits=8, grain=Grain.ROW)
    values, codes = torch.randn(6, 16), torch.empty(6, 16, dtype=torch.int8)
    weight = Weight(
        format=form, codes=codes, scale=torch.empty(6), values=values, clip=torch.ones(6)
    )
    RoundWeight(weight=weight).pack()
    for name, other in {
        "clip": torch.ones(5),
        "scale": torch.empty(5),
        "values": torch.randn(6, 15),
    }.items():
        with pytest.raises(ValueError, match="RoundWeight.weight"):
            RoundWeight(weight=dataclasses.replace(weight, **{name: other})).pack()
    x = Rows(
        coded=Coded(format=form, codes=torch.empty(3, 15, dtype=torch.int8), scale=torch.ones(1))
    )
    with pytest.raises(ValueError, match=r"Project\.weight\.codes is \[6, 16\]"):
        Project(x=x, weight=weight.bare(), out=torch.empty(3, 6)).pack()


class Pair(Value):
    a: Floats
    count: int


class Pairs(Operation):
    pairs: Out[Array[Pair, 3]]
    total: int = 7


def test_an_array_holds_up_to_so_many_values():
    first, second = torch.ones(2), torch.zeros(3)
    one = Pairs(pairs=[Pair(a=first, count=5), Pair(a=second, count=6)])
    assert [leaf.name for leaf in Pairs.leaves()] == ["pairs0.a", "pairs1.a", "pairs2.a"]
    assert [leaf.of(one) for leaf in Pairs.leaves()] == [first, second, None]
    assert [leaf.owner(one) for leaf in Pairs.leaves()] == [*one.pairs, None]
    assert one.outputs == (first, second) and one.inputs == ()
    assert one.attributes() == {"pairs0.count": 5, "pairs1.count": 6, "total": 7}
    assert [pair.a.tolist() for pair in one.bind(torch.neg).pairs] == [[-1, -1], [0, 0, 0]]
    words = first.data_ptr(), 5, second.data_ptr(), 6, 0, 0, 7
    assert struct.unpack("7Q", one.pack()) == words
    assert address_words(Pairs) == {("pairs", number, "a"): 2 * number for number in range(3)}
    one.store({"pairs": [{"a": torch.tensor([2.0, 3.0])}, {"a": torch.ones(3)}]})
    assert first.tolist() == [2, 3] and second.tolist() == [1, 1, 1]


@pytest.mark.parametrize("count", [0, 4])
def test_an_array_of_another_length_is_refused(count):
    one = Pairs(pairs=[Pair(a=torch.ones(2), count=5)] * count)
    with pytest.raises(ValueError, match=f"Pairs.pairs has {count} values; allowed: 1 to 3"):
        one.pack()
