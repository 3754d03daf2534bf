"""Trainings on codes in files: the same bits afterwards, or an error and no change."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import lsq
from lsq.models import load_codes, save_codes
from lsq.optim import Adam
from tests.models.test_trained_codes import llama, losses


def trained(tied: bool = False, remainder: bool = True, seed: int = 2, steps: int = 3):
    """(model, optimizer) after some steps."""
    model = llama(tied, seed)
    lsq.convert(model, tied=tied)
    lsq.train_codes(model, remainder=remainder)
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2 and one.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = Adam(groups, lr=1e-3, moment_bits=8).step_in_backward()
    losses(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("remainder", [False, True])
def test_training_goes_on_bit_by_bit(tied, remainder, tmp_path):
    model, optimizer = trained(tied, remainder)
    path = save_codes(model, tmp_path / "saved", optimizer)
    wanted = losses(model, optimizer, 4)
    other, again = trained(tied, remainder, seed=5, steps=1)
    load_codes(other, tmp_path / "saved", again)
    assert losses(other, again, 4) == wanted
    assert again.param_groups[0]["weight_decay"] == 0.1
    count = sum(map(torch.numel, weights(model)))
    # codes, remainders, two moments, their scales and all names
    assert path.stat().st_size < (4 if remainder else 3) * count * 1.2 + 30_000


def test_without_an_optimizer(tmp_path):
    model, _ = trained()
    path = save_codes(model, tmp_path / "saved")
    with safe_open(path, "pt") as file:
        assert not any(name.startswith("optimizer/") for name in file.keys())
    other, optimizer = trained(seed=5)
    load_codes(other, tmp_path / "saved")
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.detach().clone(), theirs.detach().clone())
    with pytest.raises(ValueError, match="has no optimizer"):
        load_codes(other, tmp_path / "saved", optimizer)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters() if one.dim() > 1]


def test_files_of_other_models_change_nothing(tmp_path):
    model, optimizer = trained()
    save_codes(model, tmp_path / "saved", optimizer)
    other, _ = trained(remainder=False, seed=5)
    before = weights(other)
    with pytest.raises(ValueError, match="also has 16 tensors, such as .*remainder"):
        load_codes(other, tmp_path / "saved")
    assert all(map(torch.equal, weights(other), before))
    small = nn.Sequential(nn.Linear(64, 64))
    lsq.convert(small)
    lsq.train_codes(small)
    with pytest.raises(ValueError, match="lacks .* tensors, such as 0"):
        load_codes(small, tmp_path / "saved")
    same, _ = trained(seed=5)
    with pytest.raises(ValueError, match="other groups of parameters"):
        load_codes(same, tmp_path / "saved", Adam(same.parameters(), moment_bits=8))


def test_a_file_without_a_moment_changes_nothing(tmp_path):
    model, optimizer = trained()
    path = save_codes(model, tmp_path / "saved", optimizer)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    gone = next(name for name in tensors if name.startswith("optimizer/") and "norm" in name)
    own = gone.rpartition(".")[0]
    save_file({n: one for n, one in tensors.items() if not n.startswith(own)}, path, metadata)
    other, again = trained(seed=5)
    before = weights(other)
    with pytest.raises(ValueError, match="moments and steps are not of the same parameters"):
        load_codes(other, tmp_path / "saved", again)
    assert all(map(torch.equal, weights(other), before))


def test_shapes_of_another_model_are_named(tmp_path):
    made = []
    for width in (64, 80):
        model = nn.Sequential(nn.Linear(64, width))
        lsq.convert(model)
        lsq.train_codes(model)
        made.append(model)
    save_codes(made[0], tmp_path / "saved")
    with pytest.raises(ValueError, match=r"is \[64.*\] in .*, and \[80"):
        load_codes(made[1], tmp_path / "saved")


def test_damaged_and_missing_files(tmp_path):
    model, _ = trained()
    path = save_codes(model, tmp_path / "saved")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        load_codes(model, tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match="save_codes writes it"):
        load_codes(model, tmp_path / "none")


def test_models_and_optimizers_that_cannot_be_saved(tmp_path):
    model, _ = trained()
    with pytest.raises(ValueError, match="call lsq.train_codes"):
        save_codes(nn.Linear(64, 64), tmp_path / "saved")
    with pytest.raises(ValueError, match="1 parameters of the optimizer are not of this"):
        save_codes(model, tmp_path / "saved", Adam([nn.Parameter(torch.ones(2, 2))]))
    assert not (tmp_path / "saved").exists()
