"""Decoding with causal layers: steps give what the whole gives.

Decoder layers: test_decoder_layer.py.
"""

import pytest
import torch

from lsq.layers import TransformerEncoderLayer, decoding
from lsq.layers.decoding import reorder
from tests.layers.examples import SOURCE, mode_on
from tests.layers.shapes import HIDDEN, config_of
from tests.layers.test_programs import forward_of

TIME, BATCH = 7, 3


def ready(**options):
    """A causal layer in eval mode, calibrated on some batch."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(config_of(**options), causal=True).eval()
    with torch.no_grad():
        layer(torch.randn(TIME, BATCH, HIDDEN))
    return layer


@pytest.mark.parametrize(
    "build",
    [
        lambda mode: decoding.decoder_step(config_of(), 4, SOURCE, mode),
        lambda mode: decoding.encoder_step(config_of(), 4, 3, mode),
    ],
)
def test_a_step_appends_one_row_to_each_sentence(build):
    program = build(mode_on(training=False, backward=False))
    assert [tensor.shape for tensor in program.outputs] == [(3, 48), (15, 144)]
    assert forward_of(program)["Append"] == 1


@pytest.mark.parametrize(
    "options", [{}, {"pre_norm": True}, {"bits": 4, "dropout": 0.3}, {"mode": "float"}]
)
def test_steps_equal_the_whole(options):
    layer = ready(**options)
    x, state = torch.randn(TIME, BATCH, HIDDEN), {}
    with torch.no_grad():
        expected = layer(x)
    found = torch.stack([layer.step(word, state) for word in x])
    assert (found - expected).abs().max() < 1e-5
    assert state["history"].shape == (BATCH, TIME, 3 * HIDDEN)
    assert state["history"].dtype == (torch.float32 if options.get("mode") else torch.int8)


def test_the_state_may_be_reordered():
    layer, order, state = ready(), torch.tensor([2, 0]), {}
    x = torch.randn(4, BATCH, HIDDEN)
    for word in x[:3]:
        layer.step(word, state)
    reorder(state, order)
    with torch.no_grad():
        expected = layer(x[:, order])[3]
    assert (layer.step(x[3, order], state) - expected).abs().max() < 1e-5


def test_layers_that_cannot_decode_say_so():
    word = torch.randn(BATCH, HIDDEN)
    with pytest.raises(ValueError, match="causal=True"):
        TransformerEncoderLayer(config_of()).eval().step(word, {})
    with pytest.raises(ValueError, match="eval mode"):
        ready().train().step(word, {})
    with pytest.raises(ValueError, match="measured"):
        TransformerEncoderLayer(config_of(), causal=True).eval().step(word, {})
