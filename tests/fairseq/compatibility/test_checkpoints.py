"""Checkpoints from and to the disk."""

import argparse
import io
import os
import pickle
import random
import re
from pathlib import Path
from typing import BinaryIO

import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.distributed.utils import _split_tensors_from_obj
from fairseq.file_io import PathManager
from omegaconf import OmegaConf
from torch import nn

from lsq import files
from lsq.commands.train import train_process
from lsq.dist.roll_call import RankLost
from lsq.fairseq.compatibility import CheckpointNotWritten, checkpoints
from lsq.files.lock import NAME, Busy, locked_folder
from tests.dist.processes import run
from tests.fairseq.two_workers import by_processes


def reloaded(content):
    """`content` after a save and a strict load."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "content",
    [
        argparse.Namespace(arch="x", lr=[0.1]),
        numpy.float64(1.5),
        numpy.int64(3),
        numpy.array([1.0, 2.0], dtype=numpy.float32),
        OmegaConf.create({"task": {"data": "x", "n": 1}, "lr": [0.1, None], "flag": True}),
        OmegaConf.create({"args": argparse.Namespace(a=1)}, flags={"allow_objects": True}),
        _split_tensors_from_obj({"weights": torch.ones(2), "step": 1}, []),
    ],
    ids=lambda content: type(content).__name__,
)
def test_what_fairseq_saves_loads_strictly(content):
    found = reloaded({"content": content})["content"]
    assert numpy.all(found == content) and type(found) is type(content)


def test_other_types_are_still_refused():
    with pytest.raises(Exception, match="Weights only load failed"):
        reloaded({"content": nn.Linear(1, 1)})


FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --max-update 1"


@pytest.fixture
def damaged(train, tmp_path):
    """A training's folder: checkpoint_last.pt with changed values, and a sound
    checkpoint_best.pt."""
    train(tmp_path, FAIRSEQ)
    content = (tmp_path / "checkpoint_last.pt").read_bytes()
    (tmp_path / "checkpoint_best.pt").write_bytes(content)
    (tmp_path / "checkpoint_last.pt").write_bytes(
        content[:20_000] + b"\x55" * 200 + content[20_200:]
    )
    return tmp_path


DAMAGED = (
    "is damaged: the checksum of its record '.*' does not fit; the newest sound .* is"
    " checkpoint_best.pt: give"
)


def test_a_damaged_checkpoint_is_refused_wherever_it_is_given(train, damaged, tmp_path):
    path, before = damaged / "checkpoint_last.pt", (damaged / "checkpoint_last.pt").read_bytes()
    with pytest.raises(ValueError, match=f"checkpoint_last.pt {DAMAGED}"):
        train(damaged, FAIRSEQ)
    for given in (f"{FAIRSEQ} --restore-file", f"{FAIRSEQ} --finetune-from-model", "--lsq-from"):
        with pytest.raises(ValueError, match=f"checkpoint_last.pt {DAMAGED}"):
            train(tmp_path / "other", f"{given} {path}")
    with pytest.raises(ValueError, match=f"checkpoint_last.pt {DAMAGED}"):
        checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert path.read_bytes() == before and not list((tmp_path / "other").glob("*.pt"))
    path.write_bytes((damaged / "checkpoint_best.pt").read_bytes()[:5000])
    with pytest.raises(
        ValueError, match="checkpoint_last.pt is damaged: its end .* checkpoint_best.pt: give"
    ):
        train(damaged, FAIRSEQ)


def test_a_training_begins_anew_only_where_nothing_was_asked_for(train, tmp_path):
    for option in ("--restore-file", "--finetune-from-model"):
        with pytest.raises(IsADirectoryError, match="is a folder"):
            train(tmp_path / "new", f"{FAIRSEQ} {option} {tmp_path}")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*none.pt"):
        train(tmp_path / "new", f"{FAIRSEQ} --restore-file {tmp_path}/none.pt")
    (tmp_path / "new" / "checkpoint_last.pt").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="checkpoint_last.pt is a folder"):
        train(tmp_path / "new", FAIRSEQ)


def test_nan_in_the_model_or_the_optimizer_is_named(train, tmp_path):
    state = train(tmp_path, FAIRSEQ)
    state["last_optimizer_state"]["state"][1]["exp_avg"][0] = float("nan")
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(
        ValueError, match=r"used: last_optimizer_state.state.1.exp_avg holds 32 values of 1024"
    ):
        train(tmp_path, FAIRSEQ)
    state["model"]["decoder.embed_tokens.weight"][2, 7] = float("inf")
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(
        ValueError, match="last.pt cannot be used: decoder.embed_tokens.weight holds 1 values"
    ):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])


def test_old_files_without_checksums_are_told_of(train, tmp_path, caplog):
    state = train(tmp_path, FAIRSEQ)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "old.pt"))
    assert "old.pt is of PyTorch before 1.6 and has no checksums" in caplog.text


def _refused(rank: int, args) -> str:
    """What `lsq train` says in one of two processes."""
    args.distributed_rank, args.distributed_world_size = rank, 2
    with pytest.raises((ValueError, RankLost)) as refused:
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), train_process)
    return str(refused.value)


@pytest.mark.thorough
def test_two_processes_end_with_the_reason(parse, damaged):
    """The first one reads the file and ends; the other one is told."""
    args = parse(f"{FAIRSEQ} --save-dir {damaged}")
    by_processes(args)
    for said in run(_refused, 2, args, ends=True):
        assert re.search(f"checkpoint_last.pt {DAMAGED}", said)
    assert not (damaged / "crash.pt").exists()


@pytest.fixture
def on_a_full_disk(monkeypatch):
    """on_a_full_disk(path): from now on a file that is written in the place of `path` finds no
    space."""

    def on_a_full_disk(path: Path) -> None:
        def open_partial(partial: Path) -> BinaryIO:
            return open("/dev/full", "wb") if path.name in partial.name else opened(partial)

        monkeypatch.setattr(files, "open_partial", open_partial)

    opened = files.open_partial
    return on_a_full_disk


def test_save_is_whole_or_not_at_all(tmp_path, on_a_full_disk):
    path = tmp_path / "checkpoint1.pt"
    checkpoint_utils.torch_persistent_save({"x": torch.ones(10)}, str(path))
    before = path.read_bytes()
    for size in (1, 100_000):  # refused at the end, and in the middle
        on_a_full_disk(path)
        with pytest.raises(
            CheckpointNotWritten,
            match=r"could not write .*checkpoint1\.pt \(No space left on device\)",
        ):
            checkpoint_utils.torch_persistent_save({"x": torch.ones(size)}, str(path))
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_copy_is_whole_or_not_at_all(tmp_path, on_a_full_disk):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"x" * 100)
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == source.read_bytes()
    on_a_full_disk(target)
    with pytest.raises(CheckpointNotWritten, match="checkpoint_last"):
        PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(tmp_path.iterdir()) == [source, target]
    with pytest.raises(FileExistsError):
        PathManager.copy(str(source), str(target))


def test_other_failures_of_a_save_are_not_disguised(tmp_path):
    with pytest.raises(Exception, match="pickle|local object"):
        checkpoint_utils.torch_persistent_save({"x": lambda: 0}, str(tmp_path / "x.pt"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_finite_is_not_written(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    state = {"model": {"encoder.embed_tokens.weight": torch.ones(3)}}
    checkpoint_utils.torch_persistent_save(state, str(path))
    before = path.read_bytes()
    state["model"]["encoder.embed_tokens.weight"][1] = float("nan")
    with pytest.raises(
        FloatingPointError, match="encoder.embed_tokens.weight holds 1 .*last.pt is not written"
    ):
        checkpoint_utils.torch_persistent_save(state, str(path))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    checkpoint_utils.torch_persistent_save(state, str(tmp_path / "crash.pt"))


@pytest.fixture(autouse=True)
def released():
    yield
    checkpoints.release_folder()


def test_a_training_has_its_folder_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "dummy").write_text("precious")  # fairseq writes and deletes a file of this name
    checkpoint_utils.verify_checkpoint_directory(str(folder))
    with pytest.raises(
        Busy, match=f"is writing into {folder}; wait for it, or choose another --save-dir"
    ):
        with locked_folder(folder, "choose another --save-dir"):
            pass
    checkpoints.release_folder()
    assert not (folder / NAME).exists() and (folder / "dummy").read_text() == "precious"


def test_another_training_in_the_same_process(tmp_path):
    for name in ("a", "a", "b"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / name))
    assert (tmp_path / "b" / NAME).exists() and not (tmp_path / "a").exists()


STATE = {"model": {"a": torch.arange(40.0), "b": torch.ones(3, 5)}, "updates": 3, "name": "x"}


@pytest.fixture
def file(tmp_path) -> Path:
    torch.save(STATE, tmp_path / "checkpoint_last.pt")
    return tmp_path / "checkpoint_last.pt"


def harmless(path: Path) -> bool:
    """Whether a file without visible damage is refused by torch.load, or read as it was written."""
    try:
        state = torch.load(path)
    except (RuntimeError, pickle.UnpicklingError):
        return True
    tensors = all(torch.equal(state["model"][name], STATE["model"][name]) for name in ("a", "b"))
    return tensors and {**state, "model": 0} == {**STATE, "model": 0}


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_changed_byte_is_found_or_changes_nothing(file, step):
    """In values, in the pickle, in headers and the table of contents."""
    whole, chance, found = file.read_bytes(), random.Random(1), 0
    places = range(0, len(whole), step)
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= chance.choice((0xFF, 0x01, 0x10, 0x80))
        file.write_bytes(changed)
        if checkpoints.damage(file) is None:
            assert harmless(file), place
        else:
            found += 1
    assert found > len(places) / 2


def test_what_is_wrong_is_named(file):
    assert checkpoints.damage(file) is None
    whole = file.read_bytes()
    place = whole.index(torch.arange(40.0).numpy().tobytes())
    file.write_bytes(whole[: place + 9] + b"\x55" + whole[place + 10 :])
    said = "the checksum of its record 'checkpoint_last/data/0' does not fit"
    assert checkpoints.damage(file) == said
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        cut = "its end is missing or its table of contents is unreadable"
        assert checkpoints.damage(file) == (cut if length else "it is empty")
    file.write_bytes(b"text")
    assert checkpoints.damage(file) == checkpoints.NO_CHECKSUMS
    torch.save(STATE, file, _use_new_zipfile_serialization=False)
    assert checkpoints.damage(file) == checkpoints.NO_CHECKSUMS


def test_the_newest_sound_one_has_made_the_most_updates(file):
    """Whatever the clock said when it was written; next are those that say no number, the last
    written one first."""
    assert checkpoints.newest_sound(file) is None and checkpoints.beside(file) == ""
    for age, name in enumerate(("checkpoint_2_20.pt", "checkpoint_best.pt", "checkpoint1.pt")):
        path = file.with_name(name)
        # the newest is cut short
        path.write_bytes(file.read_bytes() if age else file.read_bytes()[:-5])
        os.utime(path, (1e9 - age, 1e9 - age))
    file.with_name("crash.pt").write_bytes(file.read_bytes())
    assert checkpoints.newest_sound(file) == file.with_name("checkpoint_best.pt")
    said = "the newest sound checkpoint beside it is checkpoint_best.pt: give that one"
    assert said in checkpoints.beside(file)
    for age, updates in enumerate((30, 40, 20)):
        path, history = file.with_name(f"checkpoint_3_{updates}.pt"), [7, updates]
        history = [{"num_updates": number} for number in history]
        torch.save(STATE | {"optimizer_history": history}, path)
        os.utime(path, (1e8 - age, 1e8 - age))
    assert checkpoints.newest_sound(file) == file.with_name("checkpoint_3_40.pt")


def test_the_first_tensor_that_is_not_finite():
    state = {
        "model": {"a": torch.full((9,), 3e38)},  # whose sum is infinite
        "moments": [{"m": torch.ones(2, 2)}, None, "text", 3.0, torch.tensor(1)],
    }
    assert checkpoints.not_finite(state) is None
    state["moments"][0]["m"][1] = float("inf")
    said = "file.moments.0.m holds 2 values of 4 that are NaN or infinite"
    assert checkpoints.not_finite(state, "file") == said
    state["model"]["a"][0] = float("nan")
    assert checkpoints.not_finite(state) == "model.a holds 1 values of 9 that are NaN or infinite"


@pytest.mark.parametrize(
    "content", [5, [1], {}, {"model": torch.ones(2)}, {"model": {}}, torch.ones(3)]
)
def test_other_content_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt is not a checkpoint of fairseq's \(\w+: "):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "other.pt"))
