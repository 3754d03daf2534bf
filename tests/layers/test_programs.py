"""Programs of whole layers: built once, of the operations that the design names, and sound."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.program.tensor import CLIPS
from lsq.run.backends import backend
from tests.layers.examples import (
    ADAPTERS,
    GATED,
    PADDING,
    PROGRAMS,
    SENTENCES,
    SERVING,
    SOURCE,
    TRAINED,
    drawn_for,
    mode_on,
    program_of,
    run,
)
from tests.layers.shapes import config_of
from tests.sampling import first


def forward_of(program):
    return Counter(operation.name for operation in program.operations[: program.forward_length])


def test_a_program_is_built_once():
    mode, more = mode_on(), PackedSequences(rows=18, count=3)
    program = programs.encoder_layer(config_of(), SENTENCES, mode)
    assert programs.encoder_layer(config_of(), SENTENCES, mode_on()) is program
    for other in (
        programs.encoder_layer(config_of(dropout=0.1), SENTENCES, mode),
        programs.encoder_layer(config_of(), more, mode),
        programs.encoder_layer(config_of(), SENTENCES, mode, causal=True),
        programs.encoder_layer(config_of(), SENTENCES, mode_on("cpu")),
    ):
        assert other is not program


@pytest.mark.parametrize("backward, dtype", [("int8", torch.bfloat16), ("float", torch.float32)])
def test_what_goes_back_to_a_gate_is_narrow_where_codes_are_multiplied(backward, dtype):
    program = program_of("feed-forward", {**GATED, "backward": backward}, "cpu")
    gates = [one for one in program.operations if one.name == "GatedGradient"]
    assert [one.gradient.dtype for one in gates] == [dtype]
    assert not any(one.name.endswith("bias") for one in program.parameters)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_norm_of_a_layer_is_the_one_that_was_chosen(pre_norm):
    """Under pre-norm the layer ends with a sum alone."""
    config = replace(config_of(norm="rms", pre_norm=pre_norm), layer_norm_epsilon=0.5)
    program = programs.decoder_layer(config, SENTENCES, SOURCE, mode_on())
    found = Counter(operation.name for operation in program.operations)
    assert found["ResidualNorm"] == found["ResidualNormGradient"] == 3 + int(pre_norm)
    norms = [
        one for one in program.operations if one.name == "ResidualNorm" and one.weight is not None
    ]
    assert {one.epsilon for one in norms} == {0.5}
    assert all(getattr(one, "mean", None) is None for one in program.operations)
    names = {one.name for one in program.parameters}
    assert "final_layer_norm.weight" in names
    assert not any("norm" in name and name.endswith("bias") for name in names)


@pytest.mark.parametrize("options", [{"activation": "gelu"}, {"activation": "silu", "gated": True}])
def test_gradients_of_layers_with_adapters_are_slopes(options):
    """Dropout drops the same each time."""
    options = {"mode": "float", "dropout": 0.2, "attention": {"adapters": ADAPTERS}, **options}
    program = program_of("encoder", options, "reference")
    given, place = drawn_for(program), backend("reference")
    (y,), (dy,) = program.outputs, program.output_gradients
    gradients = run(program, place, given)
    for parameter in program.parameters:
        if "adapter" not in parameter.name:
            continue
        gradient, step = gradients["d_" + parameter.name], 1e-2 * torch.randn(parameter.shape)
        before = given[parameter.name].detach()
        above, below = (
            run(program, place, {**given, parameter.name: end})[y.name]
            for end in (before + step, before - step)
        )
        slope = ((above - below).double() * given[dy.name]).sum() / 2
        allowed = 0.02 * gradient.norm() * step.norm()
        assert abs((gradient * step).sum() - slope) < allowed, parameter


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward": "int8", "dropout": 0.1},
        {"clip_gradient": "lsq", "activation": "gelu"},
        {"mode": "float"},
    ],
)
@pytest.mark.parametrize("pre_norm, back", [(False, 11), (True, 12)])
def test_an_encoder_layer_is_seven_operations(pre_norm, back, options):
    """Beside the rounding of its input (post-norm) or its first norm (pre-norm)."""
    program = program_of("encoder", {"pre_norm": pre_norm, **options}, "reference")
    names = [one.name for one in program.operations[: program.forward_length]]
    first = ["ResidualNorm"] if pre_norm else ["Round"] if options.get("mode") != "float" else []
    seven = [
        "Project",
        "Attention",
        "Project",
        "ResidualNorm",
        "Project",
        "Project",
        "ResidualNorm",
    ]
    assert names == first + seven
    assert len(program.operations) - program.forward_length == back


def test_a_decoder_layer_rounds_its_memory():
    found = forward_of(program_of("decoder", {"pre_norm": True}, "reference"))
    assert found == {"Project": 7, "Attention": 2, "ResidualNorm": 4, "Round": 1}


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_float_programs_round_nothing(kind):
    program = program_of(kind, {"mode": "float"}, "reference")
    assert "Round" not in forward_of(program) and not program.lifetimes.keys() & {None}
    assert all(weight.codes is None for weight in program.weights.values())
    dtypes = {tensor.dtype for one in program.operations for tensor in one.outputs}
    assert dtypes == {torch.float32, torch.uint8}


# Every program


@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_is_written_once_before_it_is_read(name):
    program = PROGRAMS[name]()
    known = {*program.inputs, *program.parameters}
    for index, operation in enumerate(program.operations):
        if index == program.forward_length:
            known.update(program.output_gradients)
        assert known.issuperset(operation.inputs), operation.name
        assert not known.intersection(program.written(index)), operation.name
        known.update(program.written(index))
    assert known.issuperset(program.outputs) and known.issuperset(
        one for one in program.gradients if one is not None
    )
    names = [tensor.name for tensor in known]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "float" not in name])
def test_what_is_saved_is_int8_and_bits(name):
    """But for what norms read, with their statistics, scales, and LSQ's rounding errors."""
    program = PROGRAMS[name]()
    kinds = {
        leaf.of(operation): leaf.name
        for operation in program.operations
        for leaf in operation.leaves()
        if leaf.written
    }
    few = ("scale", "mean", "rstd", "log_sum", "normaliser", "bound")
    for tensor in program.saved:
        field = kinds[tensor].rpartition(".")[2]
        if tensor.dtype.is_floating_point:
            kept = (
                field == "z"
                or tensor.name.endswith(".unrotated")
                or (field == "error" and "lsq" in name)
            )
            assert field in few or kept, repr(tensor)
        else:
            assert field in ("codes", "clipped", "positive", "slope"), repr(tensor)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_parameter_gets_a_gradient(name):
    """Programs for inference have no backward pass."""
    program = PROGRAMS[name]()
    if name.startswith(tuple(SERVING)):
        assert program.forward_length == len(program.operations)
        assert not program.gradients and not program.output_gradients
        return
    assert program.output_gradients
    found = dict(zip(program.differentiable, program.gradients, strict=True))
    for parameter in program.parameters:
        gradient = found[parameter]
        if name == "wide encoder" and parameter.declared.kind in CLIPS:  # absmax
            assert gradient is None
            continue
        assert gradient.shape == parameter.shape and gradient.role == "gradient", parameter
    float_inputs = {tensor.name for tensor in program.inputs if tensor.name in ("x", "memory")}
    assert {tensor.name for tensor in found if tensor.role == "input"} == float_inputs


def test_saved_bytes_of_an_encoder_layer():
    """A row saves 8 H + F codes, a bit for each of F, and two numbers of each norm."""
    program = PROGRAMS["wide encoder"]()
    rows, hidden, inner, heads = 512, 512, 2048, 8
    # input, queries with keys and values, context, input of the feed-forward; activation
    rounded = 6 * hidden + inner
    bits = inner // 8  # positive before ReLU
    of_scales = 5 * 4  # one float for each activation
    floats = 4 * (2 * 2 + heads)
    assert program.saved_bytes == rows * (rounded + bits + 2 * hidden + floats) + of_scales


# Rows behind the last sentence, and empty sentences at the end

OPTIONS = [
    {"backward": "int8", "dropout": 0.1},
    {"backward": "float", "activation": "gelu", "pre_norm": True},
    {"mode": "float", "dropout": 0.1, "norm": "rms"},
    {"backward": "int8", "pre_norm": True, "activation": "gelu"},
    {"backward": "int8", "pre_norm": True, **GATED},
]
MORE = "decoder of more targets", "decoder of more sources"
BEHIND = {"tokens": PADDING, "target": PADDING}
"""What stands in rows behind, where that is not 0."""


def with_rows_behind(kind: str, options: dict, where, more: int):
    """A program for small sizes, or for more rows and sentences than those."""
    sizes = [
        one
        if f"of more {other}" in kind
        else PackedSequences(rows=one.rows + 7 * more, count=one.count + more)
        for one, other in ((SENTENCES, "sources"), (SOURCE, "targets"))
    ]
    return program_of(kind.partition(" ")[0], options, where, sizes)


def extended(name: str, tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """A tensor with rows behind it, or offsets with empty sentences behind them."""
    whole = tensor.new_full(size, BEHIND.get(name, 0))
    if name.endswith("cu_seqlens"):
        whole.fill_(tensor[-1])
    whole[: len(tensor)] = tensor
    return whole


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [*sorted(TRAINED.keys() - {"logits"}), *MORE])
@pytest.mark.parametrize("name", first(["cpu", "emulated", "reference"], 1, 1))
def test_rows_behind_change_nothing(kind, options, name):
    where = backend(name)
    few, many = (with_rows_behind(kind, options, where, more) for more in (0, 3))
    given = drawn_for(few)
    borders = (*many.inputs, *many.parameters, *many.output_gradients)
    sizes = {virtual.name: torch.Size(virtual.shape) for virtual in borders}
    more = {virtual: extended(virtual, tensor, sizes[virtual]) for virtual, tensor in given.items()}
    wanted, found = run(few, where, given), run(many, where, more)
    assert found.keys() == wanted.keys()
    for virtual, one in wanted.items():
        other = found[virtual]
        if other.dtype.is_floating_point:
            torch.testing.assert_close(
                other[: len(one)], one, atol=1e-5, rtol=1e-5, msg=lambda why, at=virtual: at + why
            )
        else:
            assert torch.equal(other[: len(one)], one), virtual
        behind = other[len(one) :]
        assert behind.isfinite().all(), virtual
        if virtual.startswith("d_") or "context" in virtual:
            assert not behind.any(), virtual
