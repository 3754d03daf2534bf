"""Clips that follow the largest magnitudes, and parameters that change under a module."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import lsq
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.clips import KEPT
from lsq.layers.in_place import InPlace
from lsq.layers.schedule import WINDOW
from lsq.observe import observe
from lsq.optim import Adam
from tests.layers.shapes import decibels

NAN, INF = float("nan"), float("inf")
OPTIMIZERS = [torch.optim.AdamW, Adam]


def layer_of(**options) -> QuantizedLinear:
    """A layer past the passes that measure."""
    torch.manual_seed(0)
    layer = QuantizedLinear(48, 32, quant=QuantConfig(**options))
    for _ in range(WINDOW):
        step(layer, 0.5)
    return layer


def step(layer: QuantizedLinear, *sizes: float) -> None:
    """Passes over inputs of so large values, and a step that changes nothing."""
    for size in sizes:
        layer(torch.full((3, 48), size)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    layer.zero_grad()


def largest(values: list[float], clip: float = 0.5) -> float:
    for value in values:
        clip = max(value, clip * KEPT)
    return clip


def of_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1)


@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
def test_weights_have_the_largest_magnitude_of_each_row(optimizer):
    """In passes, and in a state dict."""
    layer, x = layer_of(), torch.randn(5, 48)
    steps = optimizer and optimizer(layer.parameters(), lr=0.05)
    for change in (1.0, 3.0, 0.1):
        layer(x).sum().backward()
        if steps is None:
            with torch.no_grad():
                layer.weight.mul_(change)
        else:
            steps.step()
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        assert torch.equal(state["weight_clip"], of_rows(state["weight"]))
        layer(x).sum().backward()
        assert torch.equal(layer.weight_clip, of_rows(layer.weight))
    assert not layer.weight_clip.requires_grad and layer.weight_clip.grad is None


def test_activations_follow_the_passes_before():
    layer, sizes = layer_of(), [0.7, 0.2, 0.2, 3.0, 1.0]
    for number, size in enumerate(sizes):
        step(layer, size)
        assert layer.input_clip.item() == pytest.approx(largest(sizes[:number]))
    expected = pytest.approx(largest(sizes))
    assert layer.state_dict()["input_clip"].item() == expected
    assert layer.input_clip.item() == expected  # and once alone
    layer(torch.full((3, 48), 0.1)).sum().backward()
    assert layer.input_clip.item() == expected


def test_all_passes_of_a_step_count_alike():
    layer = layer_of()
    step(layer, *[0.1] * 20, 4.0)
    step(layer, 4.0, *[0.1] * 20)
    assert layer.eval().input_clip == 4.0
    step(layer.train(), *[0.1] * 20)
    assert layer.eval().input_clip == 4.0 * KEPT


LOOKS = {
    "a state dict": QuantizedLinear.state_dict,
    "a copy": copy.deepcopy,
    "evaluation": lambda layer: layer.eval().train(),
    "none": lambda layer: None,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_before_a_step_changes_nothing(look):
    layer, sizes = layer_of(), [4.0, 0.1, 0.3]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for size in sizes:
        layer(torch.full((3, 48), size)).sum().backward()
        LOOKS[look](layer)
        optimizer.step()
    assert layer.eval().input_clip.item() == pytest.approx(largest(sizes))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_weight_that_is_mended_has_a_clip_again(value):
    layer, x = layer_of(), torch.randn(5, 48)
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight[3] = value
    layer.state_dict()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.weight[3] = 0.0
    layer(x).sum().backward()
    wanted = of_rows(layer.weight)
    wanted[3] = 1.0
    assert torch.equal(layer.weight_clip, wanted)
    assert layer.state_dict()["weight_clip"].isfinite().all()


def test_passes_that_are_looked_at_record_the_same():
    one, other = layer_of(), layer_of()
    for size in (2.0, 0.1):
        step(one, size)
        with observe(other):
            step(other, size)
    one.eval(), other.eval()
    assert one.input_clip == other.input_clip == 2.0 * KEPT


def test_evaluation_and_passes_without_gradients_record_nothing():
    layer = layer_of()
    layer.eval()
    layer(torch.full((3, 48), 9.0, requires_grad=True)).sum().backward()
    with torch.no_grad():
        layer.train()(torch.full((3, 48), 9.0))
    layer(torch.full((3, 48), 0.5)).sum().backward()
    assert layer.eval().input_clip == 0.5


@pytest.mark.parametrize("value", [NAN, INF, 0.0])
def test_what_is_no_number_or_nothing_at_all_leaves_the_clip(value):
    layer = layer_of()
    for _ in range(3):
        step(layer, value)
    assert layer.eval().input_clip == 0.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_runs_again_has_the_clips_of_the_first_time(reentrant):
    found = []
    for checkpointed in (False, True):
        layer, results = layer_of(), []
        for size in (2.0, 0.1):
            torch.manual_seed(3)
            x = torch.full((3, 48), size, requires_grad=True)
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            y.square().sum().backward()
            results += [layer.input_clip.clone(), x.grad.clone()]
        found.append([*results, layer.eval().input_clip])
    assert all(map(torch.equal, *found))


def test_copies_and_saved_states_go_on():
    layer = layer_of()
    step(layer, 2.0)
    saved = QuantizedLinear(48, 32)
    saved.load_state_dict(layer.state_dict())
    for one in (copy.deepcopy(layer), saved, layer.double().float()):
        step(one, 0.1)
        assert one.input_clip == 2.0
        assert one.eval().input_clip == 2.0 * KEPT


def test_values_beyond_the_clip_have_a_gradient():
    layer = layer_of(backward="float")
    x = torch.full((3, 48), 0.5)
    x[0, 0] = 0.9
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.abs().min() > 0


# Parameters that change


def near(found, wanted):
    return (found - wanted).norm() < 0.03 * wanted.norm()


def twins(**options):
    """A float model of one layer, and the same converted."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64))
    ours = copy.deepcopy(plain)
    lsq.convert(ours, QuantConfig(**options))
    return plain, ours


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("outputs", [48, 80, 1024])
@pytest.mark.parametrize("clips", ["absmax", "learned"])
def test_weights_of_another_size_get_clips_of_that_size(clips, outputs, training):
    plain, ours = twins(clips=clips)
    x = torch.randn(40, 64)
    ours(x).sum().backward()
    ours.train(training)
    other = nn.Linear(64, outputs)
    for model in (plain, ours):
        model[0].weight, model[0].bias = other.weight, other.bias
    assert near(ours(x), plain(x)) and ours[0].weight_clip.shape == (outputs,)
    ours(x).sum().backward()
    assert (ours[0].weight_clip.grad is not None) == (clips == "learned")
    assert near(lsq.revert(ours)(x), plain(x))


def test_sizes_that_products_cannot_take_are_refused():
    _, ours = twins()
    ours(torch.randn(3, 64))
    ours[0].weight = nn.Parameter(torch.randn(50, 64))
    with pytest.raises(ValueError, match="outputs is 50, but int8 products need a multiple of"):
        ours(torch.randn(3, 64))
    layer = TransformerEncoderLayer(LayerConfig(hidden=32, heads=2, feed_forward=64))
    layer.self_attn.out_weight = nn.Parameter(torch.randn(48, 32))
    with pytest.raises(
        ValueError, match=r"out_weight .* is \[48, 32\], but was \[32, 32\].*lsq\.revert\(model\)"
    ):
        layer(torch.randn(5, 1, 32))


PUT = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm of hooks": nn.utils.weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", PUT)
def test_what_others_make_of_a_weight_is_used(kind):
    plain, ours = twins(backward="float")
    x, weight, gradients = torch.randn(40, 64), torch.randn(40, 64), []
    for model in (plain, ours):
        model(x)
        torch.manual_seed(1)
        PUT[kind](model[0])
        for _ in range(2):  # in training mode weights are measured in the second pass
            model.zero_grad()
            (model(x) * weight).sum().backward()
        named = model.named_parameters()
        gradients.append({name: one.grad for name, one in named if "clip" not in name})
    wanted, found = gradients
    assert wanted.keys() == found.keys()
    for name in wanted:
        assert decibels(wanted[name], found[name]) > 18, name
    assert near(ours.eval()(x), plain.eval()(x))
    assert torch.equal(lsq.revert(ours)(x), plain(x)) and not isinstance(ours[0], InPlace)
    if parametrize.is_parametrized(ours[0]):
        assert type(parametrize.remove_parametrizations(ours[0], "weight")) is nn.Linear


def steps(dtype):
    """Losses and parameters of a few steps of a model that is made under a default dtype."""
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.float32) for _ in range(2)))
        lsq.convert(model)
        optimizer, x = Adam(model.parameters(), lr=1e-2), torch.randn(9, 64, dtype=torch.float32)
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [model.eval()(x).detach(), *(one.detach() for one in model.parameters())]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    for found, wanted in zip(steps(dtype), steps(torch.float32), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, wanted)


def test_parameters_that_are_swapped_when_a_model_is_converted():
    _, ours = twins()
    x = torch.randn(9, 64)
    optimizer = Adam(ours.parameters(), lr=1e-3)
    for _ in range(3):
        ours(x).sum().backward()
        optimizer.step()
    held = ours[0].weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        ours.to(torch.bfloat16)
        assert ours[0].weight is held and held.dtype == torch.bfloat16
        assert ours[0].weight_clip.dtype == ours[0].input_clip.dtype == torch.float32
        ours(x.bfloat16()).sum().backward()
        ours.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert near(ours.eval()(x.bfloat16()).float(), QuantizedLinear.forward(ours[0].float(), x))
