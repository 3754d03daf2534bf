import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import nn

from lsq import files
from lsq.dist.topology import Topology
from lsq.fairseq import gradient_state
from lsq.fairseq.compatibility import CheckpointNotWritten

CPU = torch.device("cpu")
ALONE = Topology(world_size=1, rank=0, node_size=1)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 5)


def residuals(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"residual.{name}": torch.randn(value.numel()) for name, value in model.named_parameters()
    }


def of(rank: int, workers: int) -> Topology:
    return Topology(world_size=workers, rank=rank, node_size=1)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_what_is_written_is_read(tmp_path, group, model):
    folder, given = tmp_path / "new", residuals(model)
    gradient_state.write(folder, ALONE, 7, given)
    assert names(folder) == {"checkpoint_last.gradients-rank-0-of-1.safetensors"}
    found, reason = gradient_state.read(folder, ALONE, 7, model, CPU)
    assert reason is None and found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_files_of_other_numbers_of_workers_go_with_rank_0(tmp_path, model):
    other = [".gradients-rank-2-of-4.safetensors.old", ".gradients-rank-x-of-3.safetensors", ".pt"]
    for name in other:
        (tmp_path / f"checkpoint_last{name}").touch()
    for rank in range(3):
        gradient_state.write(tmp_path, of(rank, 3), 4, residuals(model))
    gradient_state.write(tmp_path, of(1, 2), 5, residuals(model))
    assert len(names(tmp_path)) == len(other) + 4
    gradient_state.write(tmp_path, of(0, 2), 5, residuals(model))
    kept = {f"checkpoint_last.gradients-rank-{rank}-of-2.safetensors" for rank in range(2)}
    assert names(tmp_path) == kept | {f"checkpoint_last{name}" for name in other}


@pytest.mark.parametrize(
    ("written", "updates", "reason"),
    [
        (None, 7, "there is no file"),
        (of(1, 3), 7, "there is no file .*; those here are of 3 workers, and now there are 1"),
        (ALONE, 8, "is of update 7, and the checkpoint of update 8"),
    ],
)
def test_what_does_not_belong_is_not_used(tmp_path, group, model, written, updates, reason):
    if written is not None:
        gradient_state.write(tmp_path, written, 7, residuals(model))
    found, said = gradient_state.read(tmp_path, ALONE, updates, model, CPU)
    assert found == {}
    assert re.search(reason, said)


def test_residuals_of_another_model(tmp_path, group, model):
    gradient_state.write(tmp_path, ALONE, 7, residuals(nn.Linear(3, 6)))
    assert gradient_state.read(tmp_path, ALONE, 7, model, CPU)[1].endswith(
        "is of another model: residual.bias does not fit"
    )


def test_any_damage_to_a_file_is_found(tmp_path, group, model):
    """Every byte in turn: of the header, of its length and of the values; and every length."""
    gradient_state.write(tmp_path, ALONE, 7, residuals(model))
    file = gradient_state.path(tmp_path, ALONE)
    whole = file.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :]
        for place in range(len(whole))
    ]
    for content in [*flipped, *(whole[:length] for length in range(0, len(whole), 9))]:
        file.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"rank-0-of-1.safetensors is damaged or cannot be read \(.*remove this",
        ):
            gradient_state.read(tmp_path, ALONE, 7, model, CPU)


def test_a_file_without_a_checksum_is_refused(tmp_path, group, model):
    gradient_state.path(tmp_path, ALONE).write_bytes(
        save(residuals(model), {"updates": "7", "workers": "1"})
    )
    with pytest.raises(ValueError, match="its checksum does not fit"):
        gradient_state.read(tmp_path, ALONE, 7, model, CPU)


def test_full_disk_keeps_the_previous_file(tmp_path, group, model, monkeypatch):
    gradient_state.write(tmp_path, ALONE, 7, residuals(model))
    file = gradient_state.path(tmp_path, ALONE)
    before = file.read_bytes()
    monkeypatch.setattr(files, "open_partial", lambda path: open("/dev/full", "wb"))
    with pytest.raises(
        CheckpointNotWritten, match="could not write .*rank-0-of-1.*that were there before are kept"
    ):
        gradient_state.write(tmp_path, ALONE, 8, residuals(model))
    assert file.read_bytes() == before and names(tmp_path) == {file.name, "store"}


def test_a_folder_that_cannot_be_looked_into_is_told_to_all(tmp_path, group, model):
    """An error on one worker would leave the others waiting for its word."""
    with pytest.raises(ValueError, match="cannot be read .*File name too long"):
        gradient_state.read(tmp_path / ("x" * 300), ALONE, 7, model, CPU)
