"""Calibration of a whole model: each weight once, and alike in all processes."""

import torch

from lsq.fairseq import calibration
from lsq.layers import ProgramModule
from lsq.observe import quantized_tensors


def clips_of(model) -> dict[str, torch.Tensor]:
    return {name: clip.detach().clone() for name, clip in quantized_tensors(model)}


def test_restart_measures_every_weight_once(build, monkeypatch):
    _, model = build("")
    measured = []
    original = ProgramModule.calibrate_weights

    def calibrate_weights(self) -> None:
        measured.extend(
            name
            for name, _ in quantized_tensors(self)
            if name.endswith("_weight") or name == "weight"
        )
        original(self)

    monkeypatch.setattr(ProgramModule, "calibrate_weights", calibrate_weights)
    calibration.restart(model)
    assert len(measured) == sum(name.endswith("weight") for name, _ in quantized_tensors(model))
    assert not any(module.schedule.calibrated for module in calibration.quantized_modules(model))


def test_restart_leaves_fixed_clips_alone(build):
    _, model = build("--lsq-clip-init fixed")
    before = clips_of(model)
    calibration.restart(model)
    assert all(module.schedule.calibrated for module in calibration.quantized_modules(model))
    assert all(torch.equal(clip, before[name]) for name, clip in quantized_tensors(model))
