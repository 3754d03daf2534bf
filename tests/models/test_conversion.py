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


def trained(model: nn.Module, steps: int = 3, seed: int | None = None) -> nn.Module:
    if seed is not None:
        torch.manual_seed(seed)
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


def contents(model: nn.Module) -> list[tuple]:
    """Of every module: its class, and what is in it."""
    return [
        (type(one), *map(dict, (vars(one), one._parameters, one._buffers)))
        for one in model.modules()
    ]


def test_a_converted_model_computes_nearly_the_same():
    made, plain = converted(), model()
    y, expected = made(tokens()), plain(tokens())
    assert decibels(expected, y) > 40
    assert not torch.equal(y, expected)


def test_layers_are_what_others_take_them_for():
    made, plain = converted(), model()
    block = made.blocks[0]
    assert type(block.up) is QuantizedLinear and isinstance(block.up, nn.Linear)
    assert isinstance(block.mix, Conv1D) and not isinstance(block.mix, nn.Linear)
    for name in ("up", "mix", "down"):
        ours, theirs = getattr(block, name), getattr(plain.blocks[0], name)
        assert torch.equal(ours.weight, theirs.weight)
        assert ours.weight.stride() == theirs.weight.stride()
        assert repr(ours).rstrip(")").endswith(repr(theirs).partition("(")[2].rstrip(")"))
    assert (block.up.in_features, block.up.out_features) == (64, 128)
    assert (block.mix.nx, block.mix.nf) == (128, 128)
    assert block.down.bias is None
    assert made.head.weight is made.words.weight and type(made.head) is nn.Linear


def test_parameters_hooks_and_flags_stay():
    made, calls = model(), []
    parameters = dict(made.named_parameters())
    made.blocks[1].up.requires_grad_(False)
    made.blocks[0].mix.weight.requires_grad = False
    made.blocks[0].up.register_forward_hook(lambda *_: calls.append("forward"))
    made.blocks[0].up.register_full_backward_hook(lambda *_: calls.append("backward"))
    made.eval()
    lsq.convert(made)
    assert not made.blocks[0].up.training
    assert all(made.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert not any(parameter.requires_grad for parameter in made.blocks[1].up.parameters())
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
    message = "Model is converted already; .*lsq.revert.model. first. 0 of 8 linear"
    with pytest.raises(ValueError, match=message):
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
    before, places = contents(made), [one.data_ptr() for one in made.parameters()]
    take_place = Projection.take_place

    def fail(self, quant, path):
        take_place(self, quant, path)
        if path == failing:
            raise MemoryError("half way")

    monkeypatch.setattr(Projection, "take_place", fail)
    with pytest.raises(MemoryError, match="half way"):
        lsq.convert(made, tied=True, fused=False)
    for (kind, *first), (now, *second) in zip(before, contents(made), strict=True):
        assert now is kind
        for one, other in zip(first, second, strict=True):
            assert one.keys() == other.keys()
            assert all(other[name] is value for name, value in one.items())
    assert places == [one.data_ptr() for one in made.parameters()]
    assert torch.equal(made(tokens()), model()(tokens())) and called
    handle.remove()
    assert not made.blocks[0].up._forward_hooks
    monkeypatch.undo()
    assert len(lsq.convert(made).converted) == 6


# Reverting


def test_reverting_gives_the_float_model_with_the_weights_of_now():
    made = trained(converted())
    before = {name: one.detach().clone() for name, one in float_state_dict(made).items()}
    assert lsq.revert(made) is made
    assert not any(isinstance(module, ProgramModule) for module in made.modules())
    plain = model(5)
    plain.load_state_dict(made.state_dict())
    assert same(plain.state_dict(), before)
    assert torch.equal(plain(tokens()), made(tokens()))
    assert [vars(one).keys() for one in made.modules()] == [
        vars(one).keys() for one in plain.modules()
    ]
    assert len(lsq.convert(trained(made)).converted) == 6
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


def test_what_a_float_model_says_of_the_clips():
    made = trained(converted())
    found = model(7).load_state_dict(made.state_dict(), strict=False)
    assert not found.missing_keys
    endings = {name.rpartition(".")[2] for name in found.unexpected_keys}
    counts = {"calibrated", "passes", "float_fallback", "format"}
    assert endings == {"weight_clip", "input_clip"} | counts


def test_a_state_with_some_of_the_clips_is_not_whole():
    made, state = converted(), converted().state_dict()
    del state["blocks.0.up.weight_clip"]
    with pytest.raises(RuntimeError, match='Missing key.*"blocks.0.up.weight_clip"'):
        made.load_state_dict(state)


@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_from_a_state_as_it_would_have(steps):
    made, other = trained(converted(), steps), converted(7)
    other.load_state_dict(made.state_dict())
    trained(made, seed=4), trained(other, seed=4)
    assert same(made.state_dict(), other.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_are_whole_and_independent(how):
    made, file = trained(converted()), io.BytesIO()
    torch.save(made, file)
    twin = (
        copy.deepcopy(made)
        if how == "deepcopy"
        else torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    )
    assert type(twin.blocks[0].mix) is type(made.blocks[0].mix)
    assert twin.head.weight is twin.words.weight
    before = made.state_dict()["blocks.0.mix.weight"].clone()
    trained(twin, seed=4)
    assert torch.equal(made.blocks[0].mix.weight, before)
    trained(made, seed=4)
    assert same(made.state_dict(), twin.state_dict())


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
    trained(made, 1)


def test_a_model_of_nobody_asks_nothing_of_transformers(monkeypatch):
    """Which may not be importable, as where it finds a torchaudio that is broken."""
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    assert len(lsq.convert(model()).converted) > 1


@pytest.mark.parametrize("width", ["64", None])
def test_smallest_width_is_a_number(width):
    with pytest.raises(TypeError, match=f"minimum_width is {width!r}; it must be a number"):
        converted(minimum_width=width)
