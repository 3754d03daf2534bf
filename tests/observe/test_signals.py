"""Training signals: what is collected when, what is unhealthy, and what is shown."""

from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lsq.observe import Signals, TensorStatistics, quantized_tensors
from lsq.observe.signals import FIGURES, complaint, interval_of
from tests.observe.models import batch, converted, loss_of

HEALTHY = TensorStatistics(
    kind="activation", clip=2.0, clipped_share=0.01, zero_share=0.1, largest_code=127, bits=8
)
FACTOR = 0.25
FIXED = {"clip_init": "fixed", "calibration_passes": 0}


def train(model: nn.Module, signals: Signals, *steps: int) -> list[int]:
    """Make a training pass in each step -> the last step of each whose signals are there."""
    collected = []
    for step in steps:
        model.zero_grad()
        with signals.observing(step):
            loss_of(model, batch()).backward()
        signals.record(step, FACTOR)
        collected.append(signals.last_step)
    return collected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"clipped_share": 0.05}, None),
        ({"clipped_share": 0.0501}, "5.0% of its values are clipped (clip 2"),
        (
            {"clipped_share": 0.3, "bits": None, "largest_code": None},
            "30.0% of its values are clipped",
        ),
        ({"largest_code": 8}, None),
        ({"largest_code": 7, "bits": 4}, None),
        ({"clipped_share": 0.5}, "or QuantConfig(clips='absmax'); if it follows"),
        ({"largest_code": 3, "kind": "weight"}, "QuantConfig(clips='learned') clips it"),
    ],
)
def test_complaint(changes, said):
    text = complaint(replace(HEALTHY, **changes))
    assert text is None if said is None else said in text


def test_first_and_every_interval_are_collected():
    model = converted()
    signals = Signals(model, interval=3)
    assert train(model, signals, *range(1, 8)) == [1, 1, 3, 3, 3, 6, 6]
    before = signals.last
    with signals.observing(6):  # the second batch of a step
        pass
    assert signals.last is before
    floats = Signals(nn.Linear(2, 2), interval=1)
    assert train_nothing(floats) == 0 and not floats.clips
    intervals = {0: 25, 1: 25, 10: 30, 25: 25, 100: 100}
    assert {each: interval_of(each) for each in intervals} == intervals


def train_nothing(signals: Signals) -> int:
    with signals.observing(1):
        pass
    return signals.last_step


def test_every_quantised_tensor_has_a_signal():
    model = converted()
    signals = Signals(model, interval=1)
    assert signals.summary() == "" and signals.figures(every_tensor=True) == {}
    train(model, signals, 1)
    names = {name for name, _ in quantized_tensors(model)}
    assert signals.last.keys() == names
    assert {statistics.kind for statistics in signals.last.values()} == {"weight", "activation"}
    name = "blocks.0.down.input"
    assert signals.last[name].clip == pytest.approx(signals.clips[name].item())
    of_kinds = {f"lsq/{kind}_{figure}" for kind in ("weight", "activation") for figure in FIGURES}
    of_tensors = {f"lsq/{figure}/{name}" for figure in FIGURES for name in names}
    figures = signals.figures(every_tensor=True)
    assert signals.figures(every_tensor=False).keys() == of_kinds
    assert figures.keys() == of_kinds | of_tensors
    weights = [one.zero_share for one in signals.last.values() if one.kind == "weight"]
    assert figures["lsq/weight_zero_share"] == max(weights)


def test_warned_once_for_each_tensor(caplog):
    model = converted(**FIXED, activation_clip=0.01)
    signals = Signals(model, interval=1, step="update", option="--lsq-clips {}")
    train(model, signals, 1, 2)
    warned = [record.message for record in caplog.records if record.name == "lsq.observe.signals"]
    activations = {name for name, one in signals.last.items() if one.kind == "activation"}
    assert len(warned) == len(activations) > 0
    assert {message.split(",")[0] for message in warned} == activations
    assert all(", update 1: " in message for message in warned)
    narrow = [message for message in warned if "down" not in message]  # whose values are tiny here
    assert all("or --lsq-clips absmax" in message for message in narrow)
    said = f"{len(activations)} of {len(signals.clips)} tensors were warned of"
    assert signals.summary().endswith(said)
    model = converted(**FIXED, activation_clip=1000.0)
    train(model, Signals(model, interval=1), 1)
    wide = "blocks.1.down.input, step 1: its largest code is 0 of 127, fewer than 4 bits"
    assert wide in caplog.text


def test_tensorboard_holds_four_figures_of_every_tensor(tmp_path):
    model = converted(clips="learned")
    signals = Signals(model, interval=2, folder=str(tmp_path))
    train(model, signals, 1, 2, 3, 4)
    signals.finish()
    events = EventAccumulator(str(tmp_path / "lsq")).Reload()
    assert set(events.Tags()["scalars"]) == {
        f"{figure}/{name}" for figure in (*FIGURES, "clip_gradient") for name in signals.clips
    }
    name = "blocks.0.up.input"
    points, gradients = events.Scalars(f"clip/{name}"), events.Scalars(f"clip_gradient/{name}")
    assert [point.step for point in points] == [1, 2, 4]
    assert points[-1].value == pytest.approx(signals.clips[name].item())
    assert gradients[-1].value == pytest.approx(FACTOR * signals.clips[name].grad.item())


def test_summary_has_a_row_for_the_same_tensor_of_all_layers():
    signals = Signals(converted(), interval=1, step="update")
    for layer, (clip, share) in enumerate([(1.5, 0.02), (2.5, 0.04)]):
        statistics = replace(HEALTHY, clip=clip, clipped_share=share, largest_code=100 + layer)
        signals.last[f"encoder.layers.{layer}.self_attn.context"] = statistics
    signals.last_step = 40
    long = "encoder.layers.*." + 50 * "x"
    signals.last[long] = HEALTHY
    title, heading, row, longest, warned = signals.summary().splitlines()
    assert "update 40" in title and longest.startswith(long)
    assert heading.index("kind") == row.index("activation") == longest.index("activation")
    name, *figures = row.split()
    assert name == "encoder.layers.*.self_attn.context"
    assert figures == ["activation", "1.5..2.5", "4.000%", "10.00%", "100..101"]
    assert heading.split()[:3] == ["tensor", "kind", "clip"]
    assert warned == f"0 of {len(signals.clips)} tensors were warned of"
