"""RepeatedPass: passes in eval mode run again as they were, until anything has changed."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertLayer

import lsq
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.module import ProgramModule
from lsq.layers.repeated import RepeatedPass
from lsq.run.backends import backend
from tests.constants import quant_with
from tests.layers.shapes import HIDDEN, config_of


@pytest.fixture
def prepared(monkeypatch) -> list:
    """The passes that are prepared from now on."""
    made, original = [], ProgramModule._prepare
    monkeypatch.setattr(
        ProgramModule, "_prepare", lambda *given: made.append(1) or original(*given)
    )
    return made


def encoder() -> nn.Module:
    """An encoder layer of PyTorch, whose program joins its weights and reads padded ones."""
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 48, batch_first=True))
    lsq.convert(model, minimum_width=16)
    model(torch.randn(2, 5, 32))
    return model.eval()


def repeating() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A layer in eval mode that repeats its next pass, its input and result."""
    layer, x = TransformerEncoderLayer(config_of()), torch.randn(5, 3, HIDDEN)
    layer(x)
    layer.eval()
    for _ in range(3):
        y = layer(x)
    return layer, x, y


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("make", [encoder, lambda: QuantizedLinear(32, 16).eval()])
def test_the_third_pass_repeats_the_second(make, prepared):
    model, x = make(), torch.randn(2, 5, 32)
    model(x)  # may measure clips
    first, second = model(x), model(x)
    prepared.clear()
    third, other = model(x), model(-x)
    assert torch.equal(first, second) and torch.equal(second, third) and not prepared
    fresh = copy.deepcopy(model)
    assert torch.equal(fresh(-x), other) and prepared


def test_a_pass_for_each_size(prepared):
    layer = QuantizedLinear(32, 16).eval()
    every = [torch.randn(rows, 32) for rows in (3, 70, 9)]
    first = [[layer(x) for x in every] for _ in range(3)][-1]
    prepared.clear()
    assert all(map(torch.equal, [layer(x) for x in every], first)) and not prepared
    for rows in range(100, 120):
        for _ in range(2):
            layer(torch.randn(rows, 32))
    assert len(layer.weight_state._repeated) <= 8


def replace_a_bias(layer):
    layer.feed_forward.fc1_bias = nn.Parameter(layer.feed_forward.fc1_bias + 3)


CHANGES = {
    "a weight": lambda layer: layer.feed_forward.fc1_weight.mul_(2),
    "a weight's data": lambda layer: layer.feed_forward.fc1_weight.data.mul_(2),
    "a weight by numpy": lambda layer: layer.feed_forward.fc1_weight.numpy().__imul__(2),
    "the clip of a weight": lambda layer: layer.feed_forward.fc2_weight_clip.data.mul_(4),
    "the clip of an activation": lambda layer: layer.feed_forward.activation_clip.data.mul_(0.2),
    "a bias": lambda layer: layer.feed_forward.fc1_bias.data.add_(3),
    "another bias": replace_a_bias,
    "a state dict": lambda layer: layer.load_state_dict(
        {name: -one if name.endswith("fc2_bias") else one for name, one in state(layer)}
    ),
}


def state(layer):
    return [(name, one + 1 if "bias" in name else one) for name, one in layer.state_dict().items()]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    layer, x, before = repeating()
    change(layer)
    found, twin = layer(x), copy.deepcopy(layer)
    assert not torch.equal(found, before)
    assert torch.equal(twin(x), found)
    assert torch.equal(layer(x), found) and torch.equal(layer(x), found)


def test_joined_weights_that_change_are_seen():
    model, x = encoder(), torch.randn(2, 5, 32)
    before = [model(x) for _ in range(3)][-1]
    model[0].self_attn.in_proj_bias.add_(0.5)
    found = model(x)
    assert not torch.equal(found, before)
    assert torch.equal(copy.deepcopy(model)(x), found)


def test_training_in_between(prepared):
    layer, x, before = repeating()
    layer.train()
    with torch.enable_grad():
        layer(x).square().sum().backward()
    for parameter in layer.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)
    layer.eval()
    found = layer(x)
    assert not torch.equal(found, before)
    assert torch.equal(copy.deepcopy(layer)(x), found)


def test_another_backend_computes_from_now_on():
    layer, x, before = repeating()
    layer.backend = backend("reference")
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0.2)
    assert not layer.weight_state.repeated(layer, next(iter(layer.weight_state._repeated)))


def test_an_observer_sees_the_pass(prepared):
    layer, x, _ = repeating()
    seen = []
    prepared.clear()
    layer._observer = lambda declared, operation: seen.append(operation.name)
    layer(x)
    assert seen and prepared


def test_gradients_are_made_where_they_are_wanted():
    layer, x, _ = repeating()
    with torch.enable_grad():
        x = x.requires_grad_()
        layer(x).sum().backward()
    assert x.grad is not None and layer.feed_forward.fc1_weight.grad is not None


def test_frozen_weights_free_their_memory():
    model, x = encoder(), torch.randn(2, 5, 32)
    for _ in range(3):
        before = model(x)
    lsq.freeze(model.requires_grad_(False))
    assert not any(one.weight_state._repeated for one in model.modules() if hasattr(one, "quant"))
    assert torch.equal(model(x), before)


def test_weights_as_codes_alone_keep_no_pass():
    model, x = encoder(), torch.randn(2, 5, 32)
    model(x)
    lsq.freeze(model.requires_grad_(False))
    for _ in range(3):
        model(x)
    kept = [one.weight_state._repeated for one in model.modules() if hasattr(one, "quant")]
    assert kept and not any(isinstance(one, RepeatedPass) for each in kept for one in each.values())


def test_no_copy_of_joined_weights_is_kept():
    config = BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=48)
    layer, x = nn.Sequential(BertLayer(config)).eval(), torch.randn(2, 5, 32)
    lsq.convert(layer, minimum_width=16)
    layer[0].joined.clear()  # as after a change of their memory
    layer(x)
    y = [layer(x) for _ in range(3)][-1]
    (kept,) = layer[0].weight_state._repeated.values()
    assert "qkv_weight" in "".join(name for name, one in kept._tensors.items() if one.is_meta)
    with torch.no_grad():
        layer[0].attention.self.key.weight.mul_(-1)
    assert not torch.equal(layer(x), y)


@pytest.mark.parametrize("pattern", ["", "2:4"])
def test_masked_weights_are_read_anew(pattern, prepared):
    layer = QuantizedLinear(32, 16, quant=quant_with(sparsity=pattern)).eval()
    for _ in range(5):
        layer(torch.randn(3, 32))
    assert len(prepared) == (5 if pattern else 3)
