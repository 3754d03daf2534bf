"""Programs of whole layers: built once for each shape, with the operations that the design names,
and sound."""

from collections import Counter

import pytest
import torch

from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.program import samples
from lsq.program.tensor import CLIPS
from lsq.run.executor import Execution, Hooks
from lsq.run.frames import FreshFrame
from tests.layers.examples import PROGRAMS, SENTENCES, SOURCE, mode_on
from tests.layers.shapes import config_of

SERVING = ("decoder without backward", "memory", "step", "causal step")
"""How the names of programs for inference begin."""


def forward_of(program):
    return Counter(operation.name for operation in program.operations[: program.forward_length])


def test_a_program_is_built_once():
    mode = mode_on()
    first = programs.encoder_layer(config_of(), SENTENCES, mode)
    assert programs.encoder_layer(config_of(), SENTENCES, mode_on()) is first
    assert programs.encoder_layer(config_of(dropout=0.1), SENTENCES, mode) is not first
    assert programs.encoder_layer(config_of(), PackedSequences(rows=18, count=3), mode) is not first
    assert programs.encoder_layer(config_of(), SENTENCES, mode, causal=True) is not first
    assert programs.encoder_layer(config_of(), SENTENCES, mode_on("cpu")) is not first


@pytest.mark.parametrize("backward, dtype", [("int8", torch.bfloat16), ("float", torch.float32)])
def test_what_goes_back_to_a_gate_is_narrow_where_codes_are_multiplied(backward, dtype):
    config = config_of(gated=True, activation="silu", backward=backward)
    program = programs.feed_forward(config, 7, mode_on("cpu", training=True, backward=True))
    assert [one.gradient.dtype for one in program.operations if one.name == "GatedGradient"] == [
        dtype
    ]


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
    """Beside the rounding of its input (post-norm) or its first norm (pre-norm); back there is no
    sum by itself."""
    program = programs.encoder_layer(config_of(pre_norm=pre_norm, **options), SENTENCES, mode_on())
    seven = [
        "Project",
        "Attention",
        "Project",
        "ResidualNorm",
        "Project",
        "Project",
        "ResidualNorm",
    ]
    first = ["ResidualNorm"] if pre_norm else ["Round"] if options.get("mode") != "float" else []
    assert [
        operation.name for operation in program.operations[: program.forward_length]
    ] == first + seven
    assert len(program.operations) - program.forward_length == back


def test_a_decoder_layer_rounds_its_memory():
    found = forward_of(
        programs.decoder_layer(config_of(pre_norm=True), SENTENCES, SOURCE, mode_on())
    )
    assert found == {"Project": 7, "Attention": 2, "ResidualNorm": 4, "Round": 1}


def test_float_programs_round_nothing():
    for program in (
        programs.encoder_layer(config_of(mode="float"), SENTENCES, mode_on()),
        programs.decoder_layer(config_of(mode="float"), SENTENCES, SOURCE, mode_on()),
    ):
        assert "Round" not in forward_of(program) and not program.lifetimes.keys() & {None}
        assert all(weight.codes is None for weight in program.weights.values())
        assert {str(t.dtype) for op in program.operations for t in op.outputs} == {
            "torch.float32",
            "torch.uint8",
        }


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_lifetimes_are_first_write_to_last_read(name):
    program = PROGRAMS[name]()
    used = {}
    for index, operation in enumerate(program.operations):
        for tensor in (*operation.inputs, *program.written(index)):
            used.setdefault(tensor, []).append(index)
    for tensor, places in used.items():
        first, last = program.lifetimes[tensor]
        assert first == (0 if tensor in (*program.inputs, *program.parameters) else places[0])
        if tensor in program.gradients:
            assert last == len(program.operations) - 1
        elif tensor in program.outputs:
            assert last == max(places[-1], program.forward_length - 1)
        else:
            assert last == places[-1]


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


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith(SERVING)])
def test_programs_for_inference_have_no_backward_pass(name):
    program = PROGRAMS[name]()
    assert program.forward_length == len(program.operations)
    assert not program.gradients and not program.output_gradients


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith(SERVING)])
def test_every_parameter_gets_a_gradient(name):
    program = PROGRAMS[name]()
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


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "wide" not in name])
def test_memory_is_given_back_after_the_last_reader(name):
    program = PROGRAMS[name]()
    mode = mode_on("cpu")
    read = {tensor for operation in program.operations for tensor in operation.inputs}
    values = {
        virtual: one for virtual, one in samples.border_tensors(program).items() if virtual in read
    }
    for stretch in (range(program.forward_length), program.backward_range):
        position = iter(stretch)

        def check(operation, _, position=position):
            index = next(position)
            for tensor in values:
                if tensor.role not in ("output", "gradient"):
                    assert program.lifetimes.get(tensor, (0, index))[1] >= index, (
                        f"{tensor!r} at {index}"
                    )
            assert values.keys() >= set(operation.inputs)

        Execution(program, mode.backend, hooks=Hooks(before=check)).run(
            stretch, values, FreshFrame(mode.backend.device)
        )
    assert {tensor.role for tensor in values} <= {"output", "gradient"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_text_has_everything(name):
    program = PROGRAMS[name]()
    text = str(program)
    for index, operation in enumerate(program.operations):
        assert (
            f"{index:3d} "
            f" {operation.name}({', '.join(tensor.name for tensor in operation.inputs)})\n" in text
        )
        for tensor in operation.outputs:
            first, last = program.lifetimes[tensor]
            assert f"-> {tensor!r}  alive {first}..{last}\n" in text + "\n"
        for tensor in program.scratch[index]:
            assert f"uses {tensor!r}\n" in text
    for tensor in (*program.inputs, *program.outputs):
        assert repr(tensor) in text
    for tensor in program.saved:
        assert f"{tensor!r}: {tensor.size:,} bytes" in text
