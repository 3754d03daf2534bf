import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lsq
from lsq.layers.trained_codes import TrainedCodes
from lsq.models import load_codes, save_codes
from lsq.optim import Adam


def made(remainder: bool = True, bits: int = 8) -> tuple[nn.Module, Adam]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(80, 272), nn.Linear(272, 80))
    lsq.convert(model)
    lsq.train_codes(model, remainder=remainder)
    return model, Adam(model.parameters(), 1e-2, moment_bits=bits).step_in_backward()


def train(model: nn.Module, optimizer: Adam, updates=range(3)) -> list[float]:
    losses = []
    for update in updates:
        torch.manual_seed(update)
        x = torch.randn(16, 80)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def codes_of(model: nn.Module) -> list[torch.Tensor]:
    weights = [one for one in model.parameters() if isinstance(one, TrainedCodes)]
    return [part for one in weights for part in one.own if part is not None]


def in_files(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is mapped from a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last, _, _, inode = re.match(r"(\w+)-(\w+) (\S+) \S+ (\S+) (\d+)", line).groups()
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return inode != "0"
    raise AssertionError("no mapping")


@pytest.mark.parametrize("bits", (8, 32))
@pytest.mark.parametrize("remainder", (True, False))
def test_a_training_is_the_same_bit_by_bit(remainder, bits, tmp_path):
    model, optimizer = made(remainder, bits)
    other, offloaded = made(remainder, bits)
    assert offloaded.offload(tmp_path) is offloaded
    assert train(model, optimizer) == train(other, offloaded)
    assert all(map(torch.equal, codes_of(model), codes_of(other)))
    weights = [one for one in other.parameters() if isinstance(one, TrainedCodes)]
    moved = [one for weight in weights for one in offloaded.state[weight].values()]
    moved = [one for one in moved if isinstance(one, torch.Tensor)]
    moved += [weight.own[1] for weight in weights if remainder]
    assert len(moved) == 2 * (2 + 2 * (bits == 8) + remainder)
    assert all(map(in_files, moved))
    assert not any(in_files(weight.own[0]) for weight in weights)


def test_it_begins_in_the_middle_and_after_a_resume(tmp_path):
    model, optimizer = made()
    wanted = train(model, optimizer, range(6))
    other, offloaded = made()
    losses = train(other, offloaded, range(2))
    offloaded.offload(tmp_path)
    losses += train(other, offloaded, range(2, 4))
    save_codes(other, tmp_path / "kept", offloaded)
    third, resumed = made()
    resumed.offload(tmp_path)
    load_codes(third, tmp_path / "kept", resumed)
    losses += train(third, resumed, range(4, 6))
    assert losses == wanted
    assert all(map(torch.equal, codes_of(model), codes_of(third)))
    weight = next(third.parameters())
    assert in_files(resumed.state[weight]["exp_avg"])


def test_a_state_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    model, optimizer = made()
    optimizer.offload(tmp_path)
    train(model, optimizer)
    state = optimizer.state_dict()
    wrong = {**state, "state": {**state["state"]}}
    wrong["state"][3] = {"step": 1}
    before = {one: {**optimizer.state[one]} for one in optimizer.state}
    copies = [one.clone() for state in before.values() for one in state.values() if one is not None
              and isinstance(one, torch.Tensor)]  # fmt: skip
    with pytest.raises(ValueError, match="of no Adam"):
        optimizer.load_state_dict(wrong)
    after = [one for state in before.values() for one in state.values()]
    assert all(map(torch.equal, copies, [one for one in after if isinstance(one, torch.Tensor)]))


def test_nothing_to_move(tmp_path):
    model = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"lsq.train_codes\(model\) before"):
        Adam(model.parameters()).offload(tmp_path)
    with pytest.raises(ValueError, match="is on meta; offload moves"):
        Adam(nn.Linear(3, 5, device="meta").parameters(), moment_bits=8).offload(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    model, optimizer = made()
    with pytest.raises(OSError, match="name another folder"):
        optimizer.offload(tmp_path / "none")
    assert optimizer.offloaded is None
    train(model, optimizer)


def test_a_copy_of_model_and_optimizer_steps_in_the_backward_pass_too(tmp_path):
    model, optimizer = made()
    optimizer.offload(tmp_path)
    train(model, optimizer, range(2))
    other, copied = copy.deepcopy((model, optimizer))
    assert copied.backward is not None and copied.offloaded is None
    assert train(model, optimizer, range(2, 4)) == train(other, copied, range(2, 4))
    assert all(map(torch.equal, codes_of(model), codes_of(other)))


def test_frozen_matrices_neither_step_nor_move(tmp_path):
    model, _ = made()
    frozen = nn.Parameter(torch.ones(5, 80), requires_grad=False)
    optimizer = Adam([frozen, *model.parameters()], 1e-2, moment_bits=8).step_in_backward()
    optimizer.offload(tmp_path)
    train(model, optimizer)
    assert frozen not in optimizer.state
    assert torch.equal(frozen, torch.ones(5, 80))
    frozen.requires_grad_()  # later it steps after the backward pass
    (model(frozen).sum() * 0 + frozen.sum()).backward()
    optimizer.step()
    assert not torch.equal(frozen, torch.ones(5, 80))
