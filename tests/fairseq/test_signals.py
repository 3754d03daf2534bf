"""Training signals: what is collected when, what is warned of, and what TensorBoard and the summary
show."""

import logging
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lsq.config import QuantConfig
from lsq.fairseq.signals import TrainingSignals
from lsq.layers import quantized_tensors
from tests.layers.test_signals import HEALTHY

FACTOR = 0.25
"""What the optimizer will multiply gradients by."""


@pytest.fixture
def step(build, batch):
    """step(model="--option ...", signals' options) -> (signals, one(update)), where one is a
    training pass."""

    def step(model: str = "", **options):
        task, model = build(model)
        sample = batch(task)
        signals = TrainingSignals(model, **options)

        def one(update: int) -> None:
            model.zero_grad()
            with signals.observing(update):
                loss, *_ = model(**sample["net_input"], target=sample["target"])
                loss.backward()
            signals.record(update, FACTOR)

        return signals, one

    return step


def test_first_and_every_interval_are_collected(step):
    signals, one = step(interval=3)
    collected = []
    for update in range(1, 8):
        one(update)
        collected.append(signals.last_update)
    assert collected == [1, 1, 3, 3, 3, 6, 6]


def test_every_quantised_tensor_has_a_signal(step):
    signals, one = step(interval=1)
    assert signals.summary() == ""
    one(1)
    assert signals.last.keys() == {name for name, _ in quantized_tensors(signals.model)}
    kinds = {statistics.kind for statistics in signals.last.values()}
    assert kinds == {"weight", "activation"}
    name = "encoder.layers.0.feed_forward.activation"
    assert signals.last[name].clip == pytest.approx(signals.clips[name].item())


def test_only_the_first_batch_of_an_update_is_observed(step):
    signals, one = step(interval=1)
    one(1)
    found = signals.last
    with signals.observing(1):
        pass
    assert signals.last is found


def test_warned_once_for_each_tensor(step, caplog, monkeypatch):
    monkeypatch.setattr(QuantConfig, "activation_clip", 0.01)
    signals, one = step("--lsq-clip-init fixed", interval=1)
    for update in (1, 2):
        one(update)
    warned = [record.message for record in caplog.records if record.name == "lsq.fairseq.signals"]
    activations = {
        name for name, statistics in signals.last.items() if statistics.kind == "activation"
    }
    assert len(warned) == len(activations) > 0
    assert {message.split(",")[0] for message in warned} == activations
    assert all(
        "update 1: " in message and "try --lsq-clip-init absmax" in message for message in warned
    )
    assert signals.summary().endswith(f"{len(activations)} of 54 tensors were warned of")


def test_wide_clips_are_warned_of(step, caplog, monkeypatch):
    monkeypatch.setattr(QuantConfig, "activation_clip", 1000.0)
    signals, one = step("--lsq-clip-init fixed", interval=1)
    one(1)
    assert (
        "decoder.output_projection.input, update 1: its largest code is 0 of 127, fewer than 4 bits"
        in caplog.text
    )


def test_tensorboard_holds_four_figures_of_every_tensor(step, tmp_path):
    signals, one = step("--lsq-clips learned", interval=2, folder=str(tmp_path))
    for update in (1, 2, 3, 4):
        one(update)
    signals.finish()
    events = EventAccumulator(str(tmp_path / "lsq")).Reload()
    names = [name for name, _ in quantized_tensors(signals.model)]
    figures = ("clip", "clipped_share", "zero_share", "clip_gradient")
    assert set(events.Tags()["scalars"]) == {
        f"{figure}/{name}" for figure in figures for name in names
    }
    points = events.Scalars("clip/decoder.output_projection.input")
    assert [point.step for point in points] == [1, 2, 4]
    clip = signals.clips["decoder.output_projection.input"]
    assert points[-1].value == pytest.approx(clip.item())
    gradients = events.Scalars("clip_gradient/decoder.output_projection.input")
    assert gradients[-1].value == pytest.approx(FACTOR * clip.grad.item())


def test_summary_has_a_row_for_the_same_tensor_of_all_layers(build):
    signals = TrainingSignals(build("")[1], interval=1)
    for layer, (clip, share) in enumerate([(1.5, 0.02), (2.5, 0.04)]):
        statistics = replace(HEALTHY, clip=clip, clipped_share=share, largest_code=100 + layer)
        signals.last[f"encoder.layers.{layer}.self_attn.context"] = statistics
    signals.last_update = 40
    long = "encoder.layers.*." + 50 * "x"
    signals.last[long] = HEALTHY
    title, heading, row, longest, warned = signals.summary().splitlines()
    assert "update 40" in title and longest.startswith(long)
    assert heading.index("kind") == row.index("activation") == longest.index("activation")
    name, *figures = row.split()
    assert name == "encoder.layers.*.self_attn.context"
    assert figures == ["activation", "1.5..2.5", "4.000%", "10.00%", "100..101"]
    assert [*heading.split()[:3], warned] == [
        "tensor",
        "kind",
        "clip",
        "0 of 54 tensors were warned of",
    ]


def test_training_logs_signals_and_summary(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("lsq.layers.signals.LEAST_INTERVAL", 2)
    caplog.set_level(logging.INFO)
    train(
        tmp_path / "save", f"--max-update 3 --log-interval 2 --tensorboard-logdir {tmp_path}/board"
    )
    summaries = [
        record.message
        for record in caplog.records
        if "Quantised tensors at update 2" in record.message
    ]
    assert len(summaries) == 1
    events = EventAccumulator(str(tmp_path / "board" / "lsq")).Reload()
    assert [
        point.step for point in events.Scalars("zero_share/encoder.layers.0.self_attn.qkv_weight")
    ] == [1, 2]


def test_float_training_has_no_signals(train, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path, "--max-update 1 --lsq-mode float")
    assert not any("Quantised tensors" in record.message for record in caplog.records)
