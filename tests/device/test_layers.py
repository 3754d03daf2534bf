"""Layers on the test device give what they give on the CPU in the emulator, bit by bit; others are
refused."""

import copy

import pytest
import torch

from lsq.layers import (
    Embedding,
    QuantizedLinear,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
)
from lsq.run.backends import backend
from tests.device.standin import PLACE
from tests.layers.shapes import HIDDEN, config_of, padding_mask

INT8 = {"dropout": 0.1, "backward": "int8"}


def encoder(**options):
    layer = TransformerEncoderLayer(config_of(**INT8, **options))
    x, mask = torch.randn(7, 3, HIDDEN), padding_mask(3, 7)
    return layer, lambda layer, to: layer(to(x), to(mask))


def decoder(**options):
    layer = TransformerDecoderLayer(config_of(**INT8, **options))
    x, memory, mask = torch.randn(7, 3, HIDDEN), torch.randn(9, 3, HIDDEN), padding_mask(3, 9)
    return layer, lambda layer, to: layer(to(x), to(memory), to(mask))


def linear():
    x = torch.randn(5, 3, HIDDEN)
    return QuantizedLinear(HIDDEN, 32, quant=config_of(**INT8).quant), lambda layer, to: layer(
        to(x)
    )


def embedding():
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 1, 1]])
    return Embedding(13, HIDDEN, 1, dropout=0.1), lambda layer, to: layer(to(tokens))


def vocabulary():
    x, target = torch.randn(9, HIDDEN), torch.randint(2, 29, (9,))
    layer = VocabularyProjection(29, HIDDEN, quant=config_of(**INT8).quant, padding_idx=1)
    return layer, lambda layer, to: layer.loss(to(x), to(target), 0.1)[0]


LAYERS = {
    "encoder": encoder,
    "decoder": decoder,
    "linear": linear,
    "embedding": embedding,
    "vocabulary": vocabulary,
    "encoder pre-norm": lambda: encoder(pre_norm=True, norm="rms", activation="gelu"),
}


def outcome(layer, run, to) -> dict[str, torch.Tensor]:
    """Output and gradients, on the CPU."""
    torch.manual_seed(5)
    y = run(layer, to)
    y.square().sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: tensor.cpu() for name, tensor in {"y": y.detach(), **found}.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_emulator_gives(name):
    layer, run = LAYERS[name]()
    layer.backend = backend("emulated")
    run(layer, lambda tensor: tensor)  # measures the clips
    there = copy.deepcopy(layer).to(PLACE)
    there.backend = None
    wanted, found = (
        outcome(layer, run, lambda tensor: tensor),
        outcome(there, run, lambda tensor: tensor.to(PLACE)),
    )
    for part, tensor in wanted.items():
        assert torch.equal(found[part], tensor), part
    assert all(tensor.device == PLACE for tensor in there.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_of_the_cpu_are_refused(name):
    layer, run = LAYERS[name]()
    with pytest.raises((ValueError, RuntimeError), match=r"\bcpu\b"):
        run(layer.to(PLACE), lambda tensor: tensor)
