"""Training signals of fairseq's tasks."""

import logging

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lsq.config import QuantConfig


def test_training_logs_signals_and_summary(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("lsq.observe.signals.LEAST_INTERVAL", 2)
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


def test_warnings_name_options_of_fairseq(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(QuantConfig, "activation_clip", 0.01)
    train(tmp_path, "--max-update 1 --lsq-clip-init fixed --lsq-weight-granularity tensor")
    warned = [
        record.getMessage()
        for record in caplog.records
        if record.name == "lsq.observe.signals" and record.levelno == logging.WARNING
    ]
    assert warned and all("update 1: " in message for message in warned)
    assert any("try --lsq-clip-init absmax" in message for message in warned)


def test_float_training_has_no_signals(train, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path, "--max-update 1 --lsq-mode float")
    assert not any("Quantised tensors" in record.message for record in caplog.records)
