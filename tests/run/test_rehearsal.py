"""Rehearsal: modules note their programs and compute nothing; what others keep is counted."""

from collections import Counter

import pytest
import torch
from torch import nn

import lsq
from lsq.layers import Packing, TransformerEncoderLayer
from lsq.layers.memory import plan_memory, release_memory
from lsq.run import rehearsal
from lsq.run.rehearsal import counting_kept, described
from tests.layers.shapes import config_of


def layer_and_input():
    torch.manual_seed(0)
    return TransformerEncoderLayer(config_of(dropout=0.1)), torch.ones(5, 2, 48)


def test_results_are_zeros_without_memory():
    layer, x = layer_and_input()
    with rehearsal.rehearsing() as rehearsed:
        y = layer(x)
    assert y.shape == x.shape and y.requires_grad and not y.any()
    assert [(one.node, one.backward) for one in rehearsed.passes] == [
        (0, False)
    ] and rehearsed.owners == [layer]
    assert layer(x).any(), "after the rehearsal the layer computes"
    assert rehearsal.active() is None


def test_a_run_without_backward_pass_is_not_noted():
    layer, x = layer_and_input()
    with rehearsal.rehearsing() as rehearsed, torch.no_grad():
        assert not layer(x).any()
    assert rehearsed.passes == []


def test_nothing_is_measured_or_counted():
    layer, x = layer_and_input()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    rehearsal.rehearse(lambda: layer(x).sum(), layer.parameters())
    assert not layer.schedule.calibrated and layer.schedule.passes == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_gradients_that_were_there_stay():
    layer, x = layer_and_input()
    layer(x).sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    rehearsed = rehearsal.rehearse(lambda: layer(x).sum(), layer.parameters())
    assert [(one.node, one.backward) for one in rehearsed.passes] == [(0, False), (0, True)]
    assert all(
        torch.equal(parameter.grad, before[name]) for name, parameter in layer.named_parameters()
    )


def test_tensors_at_borders_are_numbered_over_the_step():
    layer, x = layer_and_input()
    twin = TransformerEncoderLayer(config_of(dropout=0.1))
    twin.feed_forward.fc1_weight = layer.feed_forward.fc1_weight
    twin.feed_forward.fc2_weight.requires_grad_(False)
    packing, rows = Packing(shape=(2, 5)), x.view(10, 48)
    rehearsed = rehearsal.rehearse(
        lambda: twin.rows(layer.rows(rows, packing), packing).sum(), layer.parameters()
    )
    first, second = (
        {
            one.name: n
            for one, n in zip((*p.program.inputs, *p.program.parameters), p.reads, strict=True)
        }
        for p in rehearsed.passes[:2]
    )
    assert first["x"] is None and first["cu_seqlens"] is None
    assert second["x"] == rehearsed.passes[0].makes[0] != rehearsed.passes[1].makes[0]
    assert second["feed_forward.fc1_weight"] == first["feed_forward.fc1_weight"]
    assert second["feed_forward.fc2_weight"] is None
    assert second["feed_forward.fc2_bias"] not in first.values()
    assert [one.reads for one in rehearsed.passes[2:]] == [
        one.reads for one in rehearsed.passes[1::-1]
    ]


def test_an_error_ends_the_rehearsal():
    with pytest.raises(ZeroDivisionError), rehearsal.rehearsing():
        raise ZeroDivisionError
    assert rehearsal.active() is None


ROWS, WIDTH = 5, 64
BYTES = ROWS * WIDTH * 4


def test_every_storage_counts_once_with_the_module_that_keeps_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found = Counter()
    with counting_kept(model, found):
        model(torch.randn(ROWS, WIDTH)).square().sum()
    assert found == {"Linear": 2 * BYTES, "GELU": BYTES, "Tanh": BYTES}
    model(torch.randn(ROWS, WIDTH))
    assert sum(found.values()) == 4 * BYTES


def test_a_rehearsal_counts_what_is_not_of_lsq():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    lsq.convert(model)
    x = torch.randn(ROWS, WIDTH)
    memory = plan_memory(model, lambda: model(x).square().mean())
    release_memory(model)
    assert memory.outside == {"GELU": BYTES, "the loss": BYTES}
    assert repr(memory).startswith("<StepMemory: ") and "tensors of lsq's layers in 0." in str(
        memory
    )
    assert str(memory).endswith("not lsq's (GELU 0.0, the loss 0.0)")


def test_in_words():
    assert described({}) == "nothing is kept"
    many = {f"Module{number}": (number + 1) * 2**20 for number in range(7)}
    text = (
        "28.0 MiB are kept by modules that are not lsq's (Module6 7.0, Module5 6.0, Module4 5.0,"
        " Module3 4.0, "
    )
    assert described(many) == text + "Module2 3.0, 2 others)"
