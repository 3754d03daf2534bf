"""Training signals: what is collected when, what is unhealthy, and what TensorBoard and the summary
show."""

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
"""What the optimizer will multiply gradients by."""
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
        ({"clipped_share": 0.3, "bits": 4}, "30.0% of its values are clipped"),
        (
            {"clipped_share": 0.3, "bits": None, "largest_code": None},
            "30.0% of its values are clipped",
        ),
        ({"largest_code": 8}, None),
        ({"largest_code": 7}, "largest code is 7 of 127, fewer than 4 bits"),
        ({"largest_code": 7, "bits": 4}, None),
        ({"largest_code": None, "bits": None}, None),
        ({"clipped_share": 0.5}, "try QuantConfig(clip_init='absmax') or"),
        ({"largest_code": 3, "kind": "weight"}, "try QuantConfig(clip_init='mse')"),
    ],
)
def test_complaint(changes, said):
    text = complaint(replace(HEALTHY, **changes))
    assert text is None if said is None else said in text


@pytest.mark.parametrize(
    ("log_interval", "interval"), [(0, 25), (1, 25), (10, 30), (25, 25), (100, 100)]
)
def test_seldom_enough_to_cost_little(log_interval, interval):
    assert interval_of(log_interval) == interval


def test_first_and_every_interval_are_collected():
    model = converted()
    assert train(model, Signals(model, interval=3), *range(1, 8)) == [1, 1, 3, 3, 3, 6, 6]


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
    figures = signals.figures(every_tensor=True)
    of_kinds = {f"lsq/{kind}_{figure}" for kind in ("weight", "activation") for figure in FIGURES}
    assert signals.figures(every_tensor=False).keys() == of_kinds
    assert figures.keys() == of_kinds | {
        f"lsq/{figure}/{name}" for figure in FIGURES for name in names
    }
    assert figures["lsq/weight_zero_share"] == max(
        one.zero_share for one in signals.last.values() if one.kind == "weight"
    )


def test_only_the_first_batch_of_a_step_is_observed():
    model = converted()
    signals = Signals(model, interval=1)
    train(model, signals, 1)
    before = signals.last
    with signals.observing(1):
        pass
    assert signals.last is before


def test_warned_once_for_each_tensor(caplog):
    model = converted(**FIXED, activation_clip=0.01)
    signals = Signals(model, interval=1, step="update", option="--lsq-clip-init {}")
    train(model, signals, 1, 2)
    warned = [record.message for record in caplog.records if record.name == "lsq.observe.signals"]
    activations = {name for name, one in signals.last.items() if one.kind == "activation"}
    assert len(warned) == len(activations) > 0
    assert {message.split(",")[0] for message in warned} == activations
    assert all(", update 1: " in message for message in warned)
    wide = [message for message in warned if "down" not in message]  # whose values are tiny here
    assert all("try --lsq-clip-init absmax" in message for message in wide)
    tensors = len(signals.clips)
    assert signals.summary().endswith(f"{len(activations)} of {tensors} tensors were warned of")


def test_wide_clips_are_warned_of(caplog):
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


def test_a_float_model_has_no_signals():
    signals = Signals(nn.Linear(2, 2), interval=1)
    with signals.observing(1):
        pass
    assert signals.last_step == 0 and not signals.clips
