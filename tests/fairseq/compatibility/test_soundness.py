import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from lsq.fairseq.compatibility import soundness

STATE = {"model": {"a": torch.arange(40.0), "b": torch.ones(3, 5)}, "updates": 3, "name": "x"}


@pytest.fixture
def file(tmp_path) -> Path:
    torch.save(STATE, tmp_path / "checkpoint_last.pt")
    return tmp_path / "checkpoint_last.pt"


def same(state: object) -> bool:
    """Whether it is STATE."""
    tensors = all(torch.equal(state["model"][name], STATE["model"][name]) for name in ("a", "b"))
    return tensors and {**state, "model": 0} == {**STATE, "model": 0}


def harmless(path: Path) -> bool:
    """Whether a file without visible damage is refused by torch.load, or read as it was written."""
    try:
        return same(torch.load(path))
    except (RuntimeError, pickle.UnpicklingError):
        return True


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_changed_byte_is_found_or_changes_nothing(file, step):
    """In values, in the pickle, in headers and the table of contents."""
    whole, chance, found = file.read_bytes(), random.Random(1), 0
    places = range(0, len(whole), step)
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= chance.choice((0xFF, 0x01, 0x10, 0x80))
        file.write_bytes(changed)
        if soundness.damage(file) is None:
            assert harmless(file), place
        else:
            found += 1
    assert found > len(places) / 2


def test_changed_values_are_named(file):
    assert soundness.damage(file) is None
    whole = file.read_bytes()
    place = whole.index(torch.arange(40.0).numpy().tobytes())
    file.write_bytes(whole[: place + 9] + b"\x55" + whole[place + 10 :])
    said = "the checksum of its record 'checkpoint_last/data/0' does not fit"
    assert soundness.damage(file) == said


def test_a_file_that_is_cut_short(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        cut = "its end is missing or its table of contents is unreadable"
        assert soundness.damage(file) == (cut if length else "it is empty")


def test_other_files_have_no_checksums(file):
    file.write_bytes(b"text")
    assert soundness.damage(file) == soundness.NO_CHECKSUMS
    torch.save(STATE, file, _use_new_zipfile_serialization=False)
    assert soundness.damage(file) == soundness.NO_CHECKSUMS


def test_the_newest_sound_one_has_made_the_most_updates(file):
    """Whatever the clock said when it was written; next are those that say no number, the last
    written one first."""
    assert soundness.newest_sound(file) is None and soundness.beside(file) == ""
    for age, name in enumerate(("checkpoint_2_20.pt", "checkpoint_best.pt", "checkpoint1.pt")):
        path = file.with_name(name)
        # the newest is cut short
        path.write_bytes(file.read_bytes() if age else file.read_bytes()[:-5])
        os.utime(path, (1e9 - age, 1e9 - age))
    file.with_name("crash.pt").write_bytes(file.read_bytes())
    assert soundness.newest_sound(file) == file.with_name("checkpoint_best.pt")
    said = "the newest sound checkpoint beside it is checkpoint_best.pt: give that one"
    assert said in soundness.beside(file)
    for age, updates in enumerate((30, 40, 20)):
        path, history = file.with_name(f"checkpoint_3_{updates}.pt"), [7, updates]
        history = [{"num_updates": number} for number in history]
        torch.save(STATE | {"optimizer_history": history}, path)
        os.utime(path, (1e8 - age, 1e8 - age))
    assert soundness.newest_sound(file) == file.with_name("checkpoint_3_40.pt")


def test_the_first_tensor_that_is_not_finite():
    state = {
        "model": {"a": torch.full((9,), 3e38)},  # whose sum is infinite
        "moments": [{"m": torch.ones(2, 2)}, None, "text", 3.0, torch.tensor(1)],
    }
    assert soundness.not_finite(state) is None
    state["moments"][0]["m"][1] = float("inf")
    said = "file.moments.0.m holds 2 values of 4 that are NaN or infinite"
    assert soundness.not_finite(state, "file") == said
    state["model"]["a"][0] = float("nan")
    assert soundness.not_finite(state) == "model.a holds 1 values of 9 that are NaN or infinite"


@pytest.mark.parametrize(
    "content", [5, [1], {}, {"model": torch.ones(2)}, {"model": {}}, torch.ones(3)]
)
def test_other_content_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt is not a checkpoint of fairseq's \(\w+: "):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "other.pt"))
