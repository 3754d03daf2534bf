"""Residuals of error feedback, which a training reads when it goes on."""

import torch
from torch import nn

from lsq.dist.topology import Topology
from lsq.fairseq import gradient_state
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes

ALONE = Topology(world_size=1, rank=0, node_size=1)


@trial.quick_counts
def test_no_damage_to_residuals_is_read_in_silence(tmp_path, group, count):
    model = nn.Linear(30, 50)
    residuals = {
        f"residual.{name}": torch.randn(value.numel()) for name, value in model.named_parameters()
    }
    folder = tmp_path / "checkpoints"
    gradient_state.write(folder, ALONE, 7, residuals)
    path = gradient_state.path(folder, ALONE)
    content = path.read_bytes()

    def attempt(chance):
        path.write_bytes(mutated_bytes(content, chance))
        found = trial.outcome(
            lambda: gradient_state.read(folder, ALONE, 7, model, torch.device("cpu")), folder
        )
        if found.refusal is None and not found.fault:
            read, reason = found.result
            if read.keys() != residuals.keys() or not all(
                torch.equal(read[name], residuals[name]) for name in read
            ):
                return trial.Outcome(fault=f"read other residuals: {reason}")
        return found

    worked, refused = trial.survey("safetensors", count, attempt)
    assert refused > 0.8 * count, (worked, refused)
