"""Parameters that change under a module: other sizes and dtypes, swapped tensors, what others make
of weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import lsq
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.in_place import InPlace
from lsq.optim import Adam
from tests.layers.shapes import decibels


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
    x = torch.randn(40, 64)
    for model in (plain, ours):
        model(x)
        torch.manual_seed(1)
        PUT[kind](model[0])
    gradients, weight = [], torch.randn(40, 64)
    for model in (plain, ours):
        for _ in range(2):  # in training mode weights are measured in the second pass
            model.zero_grad()
            (model(x) * weight).sum().backward()
        gradients.append(
            {name: one.grad for name, one in model.named_parameters() if "clip" not in name}
        )
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
        model = nn.Sequential(
            nn.Linear(64, 64, dtype=torch.float32), nn.Linear(64, 64, dtype=torch.float32)
        )
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
