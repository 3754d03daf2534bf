"""Programs of whole layers on CUDA: the same integers and floats as on the CPU."""

import copy

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.run.backends import Backend, backend
from lsq.run.cuda import CUDA
from tests.layers.examples import ADAPTERS, program_of, run
from tests.layers.shapes import HIDDEN, config_of
from tests.ops.cuda import ORDERS, current_device, set_order
from tests.sampling import first, in_turn

OPTIONS = [
    {"backward": "int8", "dropout": 0.1},
    {"backward": "float", "activation": "gelu", "pre_norm": True},
    {"mode": "float", "dropout": 0.1, "norm": "rms"},
    {"backward": "int8", "clip_gradient": "lsq", "weight_granularity": "tensor"},
    {"backward": "int8", "dropout": 0.1, "gated": True, "activation": "silu", "pre_norm": True},
]
BY_INPUTS = [
    {"backward": "int8", "activation": "gelu_tanh", "pre_norm": True, "clip_gradient": "lsq"},
    {"backward": "float", "weight_granularity": "tensor"},
    {"mode": "float", "gated": True, "activation": "silu"},
]
"""Of layers whose weights are [inputs, outputs]."""
ADAPTED = [
    {"backward": "int8", "dropout": 0.1},
    {"backward": "int8", "activation": "gelu", "pre_norm": True},
    {"backward": "float", "clip_gradient": "lsq"},
    {"mode": "float", "dropout": 0.1},
    {"mode": "float", "activation": "gelu"},
    {"backward": "int8", "gated": True, "activation": "silu"},
]
"""Of layers with adapters."""


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`."""
    norm = wanted.double().norm()
    return float((found.double() - wanted.double()).norm() / (norm if norm > 0 else 1.0))


def assert_agree(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str
) -> None:
    """Integers equal but for one in a thousand; floats to 1e-4, a few to 1e-3."""
    assert found.keys() == wanted.keys()
    integers = [name for name, tensor in wanted.items() if not tensor.dtype.is_floating_point]
    differing = sum(int((found[name] != wanted[name]).sum()) for name in integers)
    assert differing <= sum(wanted[name].numel() for name in integers) // 1000, where
    worst = {
        name: distance(found[name], one)
        for name, one in wanted.items()
        if one.dtype.is_floating_point
    }
    assert max(worst.values()) < 1e-3, (where, worst)
    assert sum(one > 1e-4 for one in worst.values()) <= 4, (where, worst)


@pytest.mark.parametrize(
    ("kind", "options"), in_turn(("encoder", "decoder", "loss", "embedding"), OPTIONS, 2)
)
def test_a_program_gives_the_same_on_every_backend(kind, options):
    assert_same_everywhere(kind, options)


@pytest.mark.parametrize("options", first(BY_INPUTS, 1))
def test_a_layer_with_weights_in_out_gives_the_same_on_every_backend(options):
    assert_same_everywhere("encoder", {**options, "attention": {"in_out": True}})


@pytest.mark.parametrize(("kind", "options"), in_turn(("encoder", "decoder"), ADAPTED, 1))
def test_a_layer_with_adapters_gives_the_same_on_every_backend(kind, options):
    assert_same_everywhere(kind, {**options, "attention": {"adapters": ADAPTERS}})


def like_a_gpu(name: str) -> Backend:
    """A backend whose programs have no floats that are narrower than activations."""
    made = copy.copy(backend(name))
    made.either_border = False
    return made


def assert_same_everywhere(kind: str, options: dict) -> None:
    cpu, reference = like_a_gpu("cpu"), like_a_gpu("reference")
    on_the_cpu = run(program_of(kind, options, cpu), cpu)
    assert_agree(run(program_of(kind, options, reference), reference), on_the_cpu, "reference")
    for order in ORDERS:
        set_order(order)
        where = CUDA(current_device())
        where.transposed_weights = order == 1  # as on some GPUs
        assert_agree(run(program_of(kind, options, where), where), on_the_cpu, where.name)


def test_all_scales_of_a_pass_are_started_by_one_launch():
    where = CUDA(current_device())
    for kind, options in zip(
        ("encoder", "decoder", "decoder"), OPTIONS[:2] + OPTIONS[3:4], strict=True
    ):
        first, *others = program_of(kind, options, where).operations
        rounded = [one.rounding() for one in others if one.rounding() is not None]
        assert set(first.outputs) == {one.scale for one in rounded} and all(
            one.started for one in rounded
        )
        assert first.name == "StartScales" and len(rounded) > 4
    assert not program_of("encoder", OPTIONS[2], where).operations[0].name == "StartScales"


def test_a_pass_that_calibrates_rounds_under_what_it_measures():
    """The scales that stood there were those of the clips before."""
    layers, x = (
        [TransformerEncoderLayer(config_of()).eval() for _ in range(2)],
        torch.randn(7, 3, HIDDEN),
    )
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].backend = backend("emulated")
    with torch.no_grad():
        wanted, found = (layer(x) for layer in layers)
    assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize(("kind", "options"), in_turn(("encoder", "decoder"), OPTIONS[:3], 1))
def test_narrow_activations_stay_near(kind, options):
    dtype = torch.bfloat16
    where = CUDA(current_device(), activations=dtype)
    program = program_of(kind, options, where)
    narrow = {tensor.dtype for operation in program.operations for tensor in operation.outputs}
    assert dtype in narrow and program.outputs[0].dtype == dtype
    found, wanted = run(program, where), run(program_of(kind, options, "cpu"), backend("cpu"))
    assert found[program.outputs[0].name].dtype == dtype
    for name, one in wanted.items():
        # the gradient of a clip is a sum that cancels
        if one.dtype.is_floating_point and one.numel() > 1:
            assert distance(found[name], one) < 0.1, name


def test_a_module_rounds_its_weights_in_both_layouts():
    """A step on the CPU, and the same with transposed codes of weights."""
    layer = QuantizedLinear(48, 32, quant=QuantConfig(backward="int8"))
    x = torch.randn(21, 48)
    layer(x)
    steps = []
    transposing = CUDA(current_device())
    transposing.transposed_weights = True
    for where in (backend("cpu"), transposing):
        one = copy.deepcopy(layer).to(where.device)
        one.backend = where
        torch.manual_seed(0)
        given = x.to(where.device).requires_grad_()
        one(given).square().sum().backward()
        found = {"x": given, **dict(one.named_parameters())}
        steps.append(
            {name: tensor.grad.cpu() for name, tensor in found.items() if tensor.requires_grad}
        )
    assert_agree(steps[1], steps[0], "a module")
