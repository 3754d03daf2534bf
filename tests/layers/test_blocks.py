"""Layers whose norm is RMSNorm: what they are made of, their formulas in float64, and a
training."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lsq.layers import TransformerDecoderLayer, TransformerEncoderLayer, programs
from lsq.run.backends import backend
from tests.layers.examples import ADAPTERS, SENTENCES, SOURCE, drawn_for, mode_on, run
from tests.layers.oracle import compare_with_reference
from tests.layers.shapes import HIDDEN, config_of, padding_mask
from tests.layers.toy import Translator, losses


def rms(**options):
    return config_of(norm="rms", **options)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_norm_of_a_layer_is_the_one_that_was_chosen(pre_norm):
    """Under pre-norm the layer ends with a sum alone."""
    program = programs.decoder_layer(rms(pre_norm=pre_norm), SENTENCES, SOURCE, mode_on())
    found = Counter(operation.name for operation in program.operations)
    assert found["ResidualNorm"] == found["ResidualNormGradient"] == 3 + int(pre_norm)
    assert all(getattr(one, "mean", None) is None for one in program.operations)
    assert "final_layer_norm.weight" in {one.name for one in program.parameters}
    assert not any("norm" in one.name and one.name.endswith("bias") for one in program.parameters)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "float"},
        {"mode": "float", "pre_norm": True, "dropout": 0.2},
        {"dropout": 0.2},
        {"pre_norm": True, "clip_gradient": "lsq", "activation": "gelu"},
    ],
)
def test_layers_equal_the_reference(options):
    config, mask = rms(**options), padding_mask(3, 7)
    compare_with_reference(
        TransformerEncoderLayer(config),
        config,
        lambda layer, x: layer(x, mask),
        lambda reference, x: reference.encoder_layer(x, mask),
        lambda: (torch.randn(7, 3, HIDDEN),),
        padding=mask,
    )
    compare_with_reference(
        TransformerDecoderLayer(config),
        config,
        lambda layer, x, memory: layer(x, memory),
        lambda reference, x, memory: reference.decoder_layer(x, memory),
        lambda: (torch.randn(7, 3, HIDDEN), torch.randn(9, 3, HIDDEN)),
    )


@pytest.mark.parametrize("options", [{"activation": "gelu"}, {"activation": "silu", "gated": True}])
def test_gradients_of_layers_with_adapters_are_slopes(options):
    """Dropout drops the same each time."""
    config = config_of(mode="float", dropout=0.2, attention={"adapters": ADAPTERS}, **options)
    program = programs.encoder_layer(config, SENTENCES, mode_on())
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
        assert abs((gradient * step).sum() - slope) < 0.02 * gradient.norm() * step.norm(), (
            parameter
        )


def test_epsilon_is_the_configurations():
    program = programs.encoder_layer(replace(rms(), layer_norm_epsilon=0.5), SENTENCES, mode_on())
    assert {one.epsilon for one in program.operations if one.name == "ResidualNorm"} == {0.5}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_layers_learn(pre_norm):
    """A target at random, from the same input again and again."""
    torch.manual_seed(1)
    config = rms(pre_norm=pre_norm, dropout=0.1, backward="int8")
    encoder, decoder = TransformerEncoderLayer(config), TransformerDecoderLayer(config)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    x, memory, target = (torch.randn(5, 3, HIDDEN) for _ in range(3))
    found = []
    for _ in range(30):
        loss = (decoder(x, encoder(memory)) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert found[-1] < 0.6 * found[0]
    assert encoder.schedule.calibrated and decoder.schedule.calibrated


def test_a_training_goes_on_from_its_state():
    torch.manual_seed(1)
    model = Translator(norm="rms", backward="int8")
    losses(model, 3)
    state = copy.deepcopy(model.state_dict())
    other = Translator(norm="rms", backward="int8")
    other.load_state_dict(state)
    assert losses(other, 3) == losses(model, 3)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_steps_of_decoding_equal_the_whole_target(mode):
    layer = TransformerDecoderLayer(rms(mode=mode, pre_norm=True)).eval()
    x, memory = torch.randn(5, 3, HIDDEN), torch.randn(9, 3, HIDDEN)
    layer(x, memory)  # measures the clips
    state = {}
    steps = torch.cat([layer(x[t : t + 1], memory, state=state) for t in range(5)])
    assert (steps - layer(x, memory)).abs().max() < 1e-5
