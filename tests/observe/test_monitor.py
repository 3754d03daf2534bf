"""Watching a model, and what becomes of modules with too much noise."""

import copy
import io
import logging
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lsq
from lsq.config import LayerConfig
from lsq.layers import QuantizedLinear, TransformerLanguageModel
from lsq.layers.memory import plan_memory
from lsq.models import float_state_dict
from lsq.observe import Bounds
from lsq.observe.noise import QUANTITIES
from tests.constants import quant_with
from tests.observe.models import batch, converted, gated_model, loss_of, train

ALL_BELOW = Bounds(**dict.fromkeys(QUANTITIES, math.inf))
NONE_BELOW = Bounds(**dict.fromkeys(QUANTITIES, -math.inf))
DOWN = "blocks.1.down"


def fallen_model(*names: str) -> nn.Module:
    made = converted()
    train(made, None, 2)
    for name in names:
        made.get_submodule(name).fall_back()
    return made


# What is caught


def test_outliers_of_a_gated_block_are_caught(caplog):
    model = converted(1.0, 100.0)
    monitor = lsq.monitor(model, every=3)
    with caplog.at_level(logging.WARNING, "lsq"):
        losses = train(model, monitor, 16)
    assert monitor.in_floats == (DOWN,)
    assert losses[-1] < losses[0] - 0.5
    (record,) = (one for one in caplog.records if one.name.startswith("lsq.observe"))
    assert record.message.startswith(f"step 6, {DOWN}: ") and " dB, below " in record.message
    assert record.message.endswith("by 2 looks in a row; it goes on in floats, as 1 of 7 modules")


def test_a_model_without_outliers_trains_as_unwatched(caplog):
    """It stays as it is; every reading is in the table, and written."""
    model, plain, writer = converted(), converted(), Mock()
    monitor = lsq.monitor(model, every=4, writer=writer)
    nothing = "no reading yet: the next look is at step 4, and 0 are made"
    assert str(monitor) == repr(monitor) == f"{nothing}\n0 of 7 modules go on in floats"
    with caplog.at_level(logging.WARNING, "lsq"):
        assert train(model, monitor, 9) == train(plain, None, 9)
    assert not monitor.in_floats and not caplog.records
    assert len(monitor.readings) == 7
    assert all(set(one.values()) == set(QUANTITIES) for one in monitor.readings.values())
    lines = str(monitor).split("\n")
    names = ["blocks.*.gate", "blocks.*.up", "blocks.*.down", "head", "0"]
    assert [line.split()[0] for line in lines[1:]] == names
    least = min(monitor.readings[f"blocks.{number}.up"].output for number in range(2))
    assert f"{least:.1f}" in lines[2]
    written = {(tag, step): value for (tag, value, step), _ in writer.add_scalar.call_args_list}
    assert {step for _, step in written} == {4, 8} and len(written) == 2 * (7 * 3 + 1)
    assert written["signal_to_noise/modules_in_floats", 8] == 0
    assert written[f"signal_to_noise/output/{DOWN}", 4] > 10


def test_patience_wants_looks_in_a_row(caplog):
    model = converted()
    monitor = lsq.monitor(model, every=1, patience=1, bounds=ALL_BELOW, fall_back=False)
    with caplog.at_level(logging.WARNING, "lsq"):
        train(model, monitor, 3)
    said = [record.message for record in caplog.records]
    assert not monitor.in_floats and len(said) == 7  # once each
    assert all("by a look; it stays in int8" in message for message in said)
    monitor = lsq.monitor(model, every=1, patience=3, bounds=ALL_BELOW)
    train(model, monitor, 2)
    monitor._bounds = NONE_BELOW
    train(model, monitor, 1)
    monitor._bounds = ALL_BELOW
    train(model, monitor, 2)
    assert not monitor.in_floats
    train(model, monitor, 1)
    assert len(monitor.in_floats) == 7
    train(model, monitor, 1)
    assert not monitor.readings


def test_outliers_in_a_fused_layer_are_caught():
    made = pytest.importorskip("tests.models.zoo").made

    def llama(*spikes: float) -> nn.Module:
        """With outliers in the feed-forward blocks of its layers; the same function of floats."""
        model = made("llama")
        with torch.no_grad():
            for layer, spike in zip(model.model.layers, spikes, strict=True):
                layer.mlp.up_proj.weight[:3] *= spike
                layer.mlp.down_proj.weight[:, :3] /= spike
        lsq.convert(model)
        return model

    model, fresh = llama(1.0, 1000.0), llama(1.0, 1.0)
    monitor = lsq.monitor(model, every=2)
    losses = train(lambda x: model(x).logits, monitor, 14, parameters=model.parameters())
    assert monitor.in_floats == ("model.layers.1",)
    assert set(monitor.readings) == {"model.layers.0", "lm_head"}
    assert losses[-1] < losses[0]
    layer, tokens = model.model.layers[1], batch()[:2]
    model.eval()
    with torch.no_grad():
        found = model(tokens).logits
        own = layer.float_class.forward
        layer.forward = lambda *arguments, **options: own(layer, *arguments, **options)
        torch.testing.assert_close(model(tokens).logits, found, rtol=1e-3, atol=1e-3)
        del layer.forward
        generated = model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
        assert generated.shape == (2, 9)
        fresh.load_state_dict(model.state_dict())
        assert lsq.monitor(fresh).in_floats == monitor.in_floats
        torch.testing.assert_close(fresh.eval()(tokens).logits, found, rtol=1e-5, atol=1e-5)


# When it looks


def test_looks_are_every_so_many_steps_at_training_alone():
    model = converted()
    monitor = lsq.monitor(model, every=3)
    for step in range(1, 8):
        before = monitor.readings
        model.eval()
        loss_of(model, batch())
        train(model.train(), monitor, 1, first=step)
        assert (monitor.readings is not before) == (step % 3 == 0)
    model.eval()
    monitor.load_state_dict({"steps": 2, "strikes": {}})
    loss_of(model, batch()).backward()
    monitor.step()
    assert not monitor.readings


COMPILED = pytest.param("compiled", marks=pytest.mark.thorough)  # imports torch._dynamo


@pytest.mark.parametrize(
    "how", ["plain", "accumulated", "reentrant", "not reentrant", "bfloat16", COMPILED]
)
def test_ways_to_train(how):
    model = converted()
    if how.endswith("reentrant"):
        for block in model.blocks:
            block.forward = lambda x, run=block.forward: checkpoint(
                run, x, use_reentrant=how == "reentrant"
            )
    monitor = lsq.monitor(model, every=2)
    called = torch.compile(model, backend="eager") if how == "compiled" else model
    for looked_at in (7, 5):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16"):
            train(called, monitor, 2, passes=2 if how == "accumulated" else 1)
        assert len(monitor.readings) == looked_at
        assert all(set(one.values()) == set(QUANTITIES) for one in monitor.readings.values())
        for name in (DOWN, "blocks.0.up"):
            model.get_submodule(name).fall_back()
    torch.compiler.reset()


def test_frozen_layers_and_a_module_that_is_there_twice():
    model = converted()
    model.words.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up = model.blocks[1].gate
    monitor = lsq.monitor(model, every=1, patience=1, bounds=ALL_BELOW)
    train(model, monitor, 1)
    found = {name: set(reading.values()) for name, reading in monitor.readings.items()}
    assert found["blocks.0.down"] == {"output"}
    assert found[DOWN] == set(QUANTITIES)
    assert "blocks.1.up" not in found and len(found) == 6
    train(model, monitor, 1)  # all in floats, the frozen ones, too
    assert len(monitor.in_floats) == 6


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_every_use_in_a_step_is_seen(how):
    """The worst counts: of the second, nearly everything is clipped."""
    layer = QuantizedLinear(64, 64, quant=quant_with(calibration_passes=0))
    wrapped = lambda x: checkpoint(layer, x, use_reentrant=how == "reentrant")  # noqa: E731
    run = layer if how == "plain" else wrapped
    monitor = lsq.monitor(layer, every=1, fall_back=False)
    for sizes in ((1, 1), (1, 30), (30, 1)):
        torch.manual_seed(1)
        uses = [run(size * torch.randn(32, 64, requires_grad=True)) for size in sizes]
        sum(y.square().mean() for y in uses).backward()
        monitor.step()
        reading = monitor.readings[""]
        assert set(reading.values()) == set(QUANTITIES)
        assert reading.output > 25 if sizes == (1, 1) else reading.output < 3


def test_what_does_not_go_back_or_is_not_finite_says_nothing():
    model = converted()
    monitor = lsq.monitor(model, every=1, patience=1, bounds=Bounds(output=-math.inf))
    (loss_of(model, batch()) * math.inf).backward()
    monitor.step()
    assert not monitor.in_floats
    assert all(set(one.values()) == {"output"} for one in monitor.readings.values())
    loss = loss_of(model, batch())
    monitor.step()
    assert not monitor.readings
    loss.backward()
    monitor.close()
    monitor.step()
    assert not monitor.readings


def test_whole_layers_and_their_planned_memory(caplog):
    torch.manual_seed(3)
    config = LayerConfig(hidden=32, heads=4, feed_forward=48, pre_norm=True, dropout=0.1)
    model = TransformerLanguageModel(37, config, layers=2, padding_idx=1)
    tokens = torch.randint(2, 37, (5, 10), generator=torch.Generator().manual_seed(1))

    def step() -> torch.Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])[0]

    step()
    memory = plan_memory(model, step)
    monitor = lsq.monitor(model, every=1, patience=1, bounds=NONE_BELOW)
    for _ in range(2):
        step().backward()
        monitor.step()
        assert set(monitor.readings) == {"layers.0", "layers.1", "output_projection"}
    monitor._bounds = Bounds(output=-math.inf, input_gradient=-math.inf, weight_gradient=math.inf)
    with caplog.at_level(logging.WARNING, "lsq"):
        step().backward()
        monitor.step()
    assert len(monitor.in_floats) == 3
    assert sum("planned memory is released" in one.message for one in caplog.records) == (
        memory is not None
    )
    model.zero_grad()
    plan_memory(model, step)  # of what it is now
    step().backward()
    assert model.layers[0].get_parameter("feed_forward.fc1_weight").grad.any()
    model.eval()
    logits = model(tokens)
    assert logits.shape == (5, 10, 37)
    with pytest.raises(ValueError, match="this layer went on in floats"):
        model.next_word(tokens[:, :1], {})


# What a module in floats is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_in_floats_is_the_float_layer(dtype):
    model = fallen_model(DOWN)
    layer, x = model.get_submodule(DOWN), torch.randn(5, 128, dtype=dtype, requires_grad=True)
    plain = nn.Linear(128, 64, bias=False, dtype=dtype)
    plain.load_state_dict({"weight": layer.weight.detach()})
    found, expected = layer(x), plain(x.detach())
    assert found.dtype == dtype and torch.equal(found, expected)
    found.float().sum().backward()
    assert layer.weight.grad.any() and x.grad.any()
    assert layer.input_clip.grad is None and layer.weight_clip.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(torch.randn(0, 128)).shape == (0, 64)
    clips = {name: clip.clone() for name, clip in layer.clips().items()}
    train(model, None, 2)
    assert all(torch.equal(clips[name], clip) for name, clip in layer.clips().items())
    expected = float_state_dict(model)
    lsq.revert(model)
    assert model.state_dict().keys() == expected.keys()


# Checkpoints


def saved(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_a_training_goes_on_as_it_would_have():
    whole = converted(1.0, 100.0)
    monitor = lsq.monitor(whole, every=2)
    train(whole, monitor, 3)
    state, own = saved(whole.state_dict()), saved(monitor.state_dict())
    assert own == {"steps": 3, "strikes": {**own["strikes"], DOWN: 1}}
    expected = train(whole, monitor, 4, first=3)
    other = converted()
    other_monitor = lsq.monitor(other, every=2)
    other.load_state_dict(state)
    other_monitor.load_state_dict(own)
    assert train(other, other_monitor, 4, first=3) == expected
    assert monitor.in_floats == other_monitor.in_floats == (DOWN,)


def test_a_checkpoint_brings_what_has_fallen_and_takes_it_away():
    before, after, x = fallen_model(), fallen_model(DOWN), torch.randn(3, 128)
    fresh, state = converted(), saved(after.state_dict())
    renamed = {name.replace("float_fallback", "fallen"): value for name, value in state.items()}
    older = {name: value for name, value in state.items() if not name.endswith("float_fallback")}
    for loaded, fallen in (
        (state, True),
        (saved(before.state_dict()), False),
        (renamed, True),  # of an earlier version
        ({"words.weight": state["words.weight"]}, True),  # which says nothing of it
        (older, False),
    ):
        fresh.load_state_dict(loaded, strict="words.weight" not in loaded or len(loaded) > 1)
        assert lsq.monitor(fresh).in_floats == ((DOWN,) if fallen else ())
        same = (after if fallen else before).eval().get_submodule(DOWN)
        assert torch.equal(fresh.eval().get_submodule(DOWN)(x), same(x))


def test_copies_are_in_floats_and_not_watched():
    model = fallen_model(DOWN)
    monitor = lsq.monitor(model, every=1)
    twin = copy.deepcopy(model)
    train(twin, None, 1)
    monitor.step()
    assert not monitor.readings and lsq.monitor(twin).in_floats == (DOWN,)


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lsq.monitor(gated_model()), "GatedModel has no module that computes in int8; ca"),
        (
            lambda: lsq.monitor(converted()).load_state_dict({"step": 1}),
            "the state has 'step'; a monitor's has 'steps' and 'strikes'",
        ),
        (lambda: lsq.monitor(converted(), every=0), "every is 0; it must be a whole number above"),
        (lambda: lsq.monitor(converted(), rows=0), "rows is 0; it must be a whole number above 0"),
        (lambda: lsq.monitor(converted(), patience=0), "patience is 0; it must be a whole number"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()
