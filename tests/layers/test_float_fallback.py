"""Modules that go on in floats: their programs, and parameters that count for nothing."""

import dataclasses

import pytest
import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import TransformerEncoderLayer, VocabularyProjection, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.float_fallback import held, in_floats
from lsq.layers.programs import Mode
from lsq.run.backends import backend

CONFIG = LayerConfig(hidden=32, heads=2, feed_forward=48)
FLOAT = dataclasses.replace(CONFIG, quant=QuantConfig(mode="float"))
MODE = Mode(training=True, backward=True, backend=backend("reference"))


def test_the_program_is_that_of_float_mode():
    sentences = PackedSequences(rows=7, count=2)
    made = in_floats(programs.encoder_layer(CONFIG, sentences, MODE, causal=True))
    assert str(made) == str(programs.encoder_layer(FLOAT, sentences, MODE, causal=True))
    assert in_floats(made) is made
    linear = programs.linear(CONFIG.quant, 5, 16, 32, MODE, bias=True, dtypes=(torch.bfloat16,) * 3)
    assert {
        tensor.dtype for tensor in (*in_floats(linear).inputs[1:], *in_floats(linear).outputs)
    } == {torch.float32}


@pytest.mark.parametrize("training", [True, False])
def test_a_fallen_layer_is_one_of_float_mode(training):
    torch.manual_seed(1)
    layer, plain = (TransformerEncoderLayer(one).train(training) for one in (CONFIG, FLOAT))
    plain.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if name in plain.state_dict()}
    )
    layer.fall_back()
    x = torch.randn(5, 3, 32)
    expected = plain(x)
    assert torch.equal(layer(x), expected)
    expected.sum().backward()
    layer(x).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(layer.get_parameter(name).grad, parameter.grad), name
    assert all(clip.grad is None for clip in layer.clips().values())


def test_a_fallen_vocabulary_has_all_words():
    layer, x = VocabularyProjection(37, 32), torch.randn(5, 32)
    layer.fall_back()
    torch.testing.assert_close(layer(x), x @ layer.weight.t())
    loss, _ = layer.loss(x, torch.arange(5))
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(x @ layer.weight.t(), torch.arange(5)) * 5
    )


def test_held_parameters_are_reached_without_a_gradient():
    y, parameter = torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    reached = []
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: reached.append(True))
    result = held(y * 2, [parameter])
    (result * torch.arange(3.0)).sum().backward()
    assert reached and parameter.grad is None
    assert torch.equal(y.grad, 2 * torch.arange(3.0))
