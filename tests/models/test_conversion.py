"""What convert and revert leave as it was, and what they change."""

import copy
import io
import sys
import types

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers import ProgramModule, QuantizedLinear
from lsq.layers.linear import Projection
from lsq.models import float_state_dict
from tests.layers.shapes import decibels
from tests.models.models import Conv1D, Model, loss_of, model, tokens


def converted(seed: int = 1, **options) -> Model:
    made = model(seed)
    lsq.convert(made, **options)
    return made


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        loss_of(model(tokens())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_converted_model_computes_nearly_the_same():
    made, plain = converted(), model()
    y, expected = made(tokens()), plain(tokens())
    assert decibels(expected, y) > 40
    assert not torch.equal(y, expected)


def test_layers_are_what_others_take_them_for():
    made, plain = converted(), model()
    assert type(made.blocks[0].up) is QuantizedLinear and isinstance(made.blocks[0].up, nn.Linear)
    assert isinstance(made.blocks[0].mix, Conv1D) and not isinstance(made.blocks[0].mix, nn.Linear)
    for name in ("up", "mix", "down"):
        ours, theirs = getattr(made.blocks[0], name), getattr(plain.blocks[0], name)
        assert (
            torch.equal(ours.weight, theirs.weight)
            and ours.weight.stride() == theirs.weight.stride()
        )
        assert repr(ours).rstrip(")").endswith(repr(theirs).partition("(")[2].rstrip(")"))
    assert (made.blocks[0].up.in_features, made.blocks[0].up.out_features) == (64, 128)
    assert (made.blocks[0].mix.nx, made.blocks[0].mix.nf) == (128, 128)
    assert made.blocks[0].down.bias is None
    assert made.head.weight is made.words.weight
    assert type(made.head) is nn.Linear


def test_parameters_hooks_and_flags_stay():
    made = model()
    parameters = dict(made.named_parameters())
    made.blocks[1].up.requires_grad_(False)
    made.blocks[0].mix.weight.requires_grad = False
    calls = []
    made.blocks[0].up.register_forward_hook(lambda *_: calls.append("forward"))
    made.blocks[0].up.register_full_backward_hook(lambda *_: calls.append("backward"))
    made.eval()
    lsq.convert(made)
    assert not made.blocks[0].up.training
    assert all(made.get_parameter(name) is parameter for name, parameter in parameters.items())
    layer = made.blocks[1].up
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not made.blocks[0].mix.input_clip.requires_grad and made.blocks[0].mix.bias.requires_grad
    loss_of(made.train()(tokens())).backward()
    assert calls == ["forward", "backward"]


def test_a_model_that_is_one_layer():
    layer = nn.Linear(64, 64)
    assert lsq.convert(layer).converted == ("",)
    assert type(layer) is QuantizedLinear


def test_converting_twice_changes_nothing_more():
    made = converted(skip="mix")
    report = lsq.convert(made)
    assert report.converted == ("blocks.0.mix", "blocks.1.mix")
    assert report.left["blocks.0.up"] == "is lsq's already"
    with pytest.raises(
        ValueError, match="Model is converted already; .*lsq.revert.model. first. 0 of 8 linear"
    ):
        lsq.convert(made)


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ValueError, match="mode is 'float'"):
        lsq.convert(model(), QuantConfig(mode="float"))
    with pytest.raises(ValueError, match="has no linear layer to convert"):
        lsq.convert(nn.LayerNorm(64))


@pytest.mark.parametrize("failing", ["blocks.1.mix", "head"])
def test_after_an_exception_half_way_the_model_is_as_it_was(failing, monkeypatch):
    made, called = model(), []
    handle = made.blocks[0].up.register_forward_hook(lambda *_: called.append(1))
    made.blocks[0].mix.bias.requires_grad_(False)
    before = [
        (type(one), dict(vars(one)), dict(one._parameters), dict(one._buffers))
        for one in made.modules()
    ]
    places = [one.data_ptr() for one in made.parameters()]
    take_place = Projection.take_place

    def fail(self, quant, path):
        take_place(self, quant, path)
        if path == failing:
            raise MemoryError("half way")

    monkeypatch.setattr(Projection, "take_place", fail)
    with pytest.raises(MemoryError, match="half way"):
        lsq.convert(made, tied=True, fused=False)
    after = [
        (type(one), dict(vars(one)), dict(one._parameters), dict(one._buffers))
        for one in made.modules()
    ]
    assert [kind for kind, *_ in after] == [kind for kind, *_ in before]
    for (_, *first), (_, *second) in zip(before, after, strict=True):
        for one, other in zip(first, second, strict=True):
            assert one.keys() == other.keys() and all(
                other[name] is value for name, value in one.items()
            )
    assert places == [one.data_ptr() for one in made.parameters()]
    assert torch.equal(made(tokens()), model()(tokens())) and called
    handle.remove()
    assert not made.blocks[0].up._forward_hooks
    monkeypatch.undo()
    assert len(lsq.convert(made).converted) == 6


# Reverting


def test_reverting_gives_the_float_model_with_the_weights_of_now():
    made = trained(converted())
    parameters = {
        name: value.detach().clone()
        for name, value in made.named_parameters()
        if "clip" not in name
    }
    assert lsq.revert(made) is made
    assert not any(isinstance(module, ProgramModule) for module in made.modules())
    plain = model(5)
    plain.load_state_dict(made.state_dict())
    assert same(dict(plain.named_parameters()), parameters)
    assert torch.equal(plain(tokens()), made(tokens()))
    assert [vars(one).keys() for one in made.modules()] == [
        vars(one).keys() for one in plain.modules()
    ]


def test_a_reverted_model_is_converted_again():
    made = trained(lsq.revert(trained(converted())))
    assert len(lsq.convert(made).converted) == 6
    trained(made)


def test_a_forward_that_somebody_wrapped_is_not_reverted():
    made = converted()
    made.blocks[0].up.forward = made.blocks[0].up.forward
    with pytest.raises(ValueError, match="forward of its own"):
        lsq.revert(made)
    assert isinstance(made.blocks[1].up, ProgramModule)


# State


def test_a_float_state_loads_strictly_and_clips_are_measured_anew():
    made, other = trained(converted()), model(7)
    made.load_state_dict(other.state_dict())
    lsq.convert(other)
    torch.manual_seed(0)
    y = made(tokens())
    assert torch.equal(y, other(tokens()))
    assert same(made.state_dict(), other.state_dict())


def test_a_state_of_a_converted_model_loads_into_a_float_one():
    made, plain = trained(converted()), model(7)
    plain.load_state_dict(float_state_dict(made))
    lsq.revert(made)
    assert same(plain.state_dict(), made.state_dict())


def test_what_a_float_model_says_of_the_clips():
    found = model().load_state_dict(converted().state_dict(), strict=False)
    assert not found.missing_keys
    endings = {name.rpartition(".")[2] for name in found.unexpected_keys}
    counts = {"calibrated", "passes", "float_fallback", "format"}
    assert endings == {"weight_clip", "input_clip"} | counts


def test_a_state_with_some_of_the_clips_is_not_whole():
    made, state = converted(), converted().state_dict()
    del state["blocks.0.up.weight_clip"]
    with pytest.raises(RuntimeError, match='Missing key.*"blocks.0.up.weight_clip"'):
        made.load_state_dict(state)


def test_a_state_before_the_first_pass():
    made, other = converted(), converted(7)
    other.load_state_dict(made.state_dict())
    assert torch.equal(made(tokens()), other(tokens()))


def test_training_goes_on_from_a_state_as_it_would_have():
    made, other = trained(converted()), converted(7)
    other.load_state_dict(made.state_dict())
    for one in (made, other):
        torch.manual_seed(4)
        trained(one)
    assert same(made.state_dict(), other.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_are_whole_and_independent(how):
    made = trained(converted())
    if how == "deepcopy":
        twin = copy.deepcopy(made)
    else:
        file = io.BytesIO()
        torch.save(made, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(twin.blocks[0].mix) is type(made.blocks[0].mix)
    assert twin.head.weight is twin.words.weight
    before = made.state_dict()["blocks.0.mix.weight"].clone()
    torch.manual_seed(4)
    trained(twin)
    assert torch.equal(made.blocks[0].mix.weight, before)
    torch.manual_seed(4)
    trained(made)
    assert same(made.state_dict(), twin.state_dict())


# The meta device


@pytest.mark.parametrize("way", ["assign", "to_empty", "by hand"])
def test_weights_come_after_a_conversion_on_the_meta_device(way):
    with torch.device("meta"):
        made = Model()
        lsq.convert(made)
    plain = model(3)
    if way == "assign":
        made.load_state_dict(plain.state_dict(), assign=True)
        assert not any(parameter.is_meta for parameter in made.parameters())
    elif way == "to_empty":
        made.to_empty(device="cpu")
        made.load_state_dict(plain.state_dict())
    else:
        for name, parameter in plain.named_parameters():
            path, _, last = name.rpartition(".")
            setattr(made.get_submodule(path), last, parameter)
    made.head.weight = made.words.weight
    assert decibels(plain(tokens()), made(tokens())) > 40
    lsq.convert(plain)
    trained(made, 1)


def test_a_model_of_nobody_asks_nothing_of_transformers(monkeypatch):
    """Which may not be importable, as where it finds a torchaudio that is broken."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    assert len(lsq.convert(model()).converted) > 1
