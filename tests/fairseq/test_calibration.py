"""Calibration of a whole model: each weight once, and alike in all processes."""

import pytest
import torch

from lsq.fairseq import calibration
from lsq.layers import ProgramModule, quantized_tensors


@pytest.fixture
def two_processes(monkeypatch):
    """The other process, which is not there, holds clips twice as large; yields the sizes of the exchanges so far."""
    exchanges = []

    def all_reduce(tensor: torch.Tensor, group) -> None:
        exchanges.append(tensor.numel())
        tensor.mul_(3.0)

    monkeypatch.setattr(calibration.distributed, "get_data_parallel_group", lambda: None)
    monkeypatch.setattr(calibration.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(calibration.distributed, "all_reduce", all_reduce)
    return exchanges


def clips_of(model) -> dict[str, torch.Tensor]:
    return {name: clip.detach().clone() for name, clip in quantized_tensors(model)}


def test_restart_measures_every_weight_once(build, monkeypatch):
    _, model = build("")
    measured = []
    original = ProgramModule.calibrate_weights

    def calibrate_weights(self) -> None:
        measured.extend(name for name, _ in quantized_tensors(self) if name.endswith("_weight") or name == "weight")
        original(self)

    monkeypatch.setattr(ProgramModule, "calibrate_weights", calibrate_weights)
    calibration.restart(model)
    assert len(measured) == sum(name.endswith("weight") for name, _ in quantized_tensors(model))
    assert not any(module.schedule.calibrated for module in calibration.quantized_modules(model))


def test_restart_leaves_fixed_clips_alone(build):
    _, model = build("--lsq-activation-init fixed --lsq-weight-init fixed")
    before = clips_of(model)
    calibration.restart(model)
    assert all(module.schedule.calibrated for module in calibration.quantized_modules(model))
    assert all(torch.equal(clip, before[name]) for name, clip in quantized_tensors(model))


def test_clips_are_averaged_where_they_are_due(build, batch, two_processes):
    task, model = build("")
    sample = batch(task)["net_input"]
    _, alone = build("")
    alone.load_state_dict(model.state_dict())

    def run():
        return model(**sample)

    with torch.no_grad():
        model.eval()
        alone.eval()(**sample)
        calibration.together(model, run)
    assert two_processes == [sum(clip.numel() for clip in clips_of(model).values())]
    for name, clip in quantized_tensors(alone):
        torch.testing.assert_close(clips_of(model)[name], clip.detach() * 1.5)

    calibration.together(model, lambda: pytest.fail("no clip is due"))


def test_one_process_does_nothing(build):
    calibration.together(build("")[1], lambda: pytest.fail("one process measures as it goes"))


def test_training_in_two_processes_averages_before_the_first_update(build, batch, two_processes):
    task, model = build("")
    model(**batch(task)["net_input"])
    assert len(two_processes) == 1
    model(**batch(task)["net_input"])
    assert len(two_processes) == 1
