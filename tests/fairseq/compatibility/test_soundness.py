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


def test_a_sound_file(file):
    assert soundness.damage(file) is None


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
    whole = file.read_bytes()
    place = whole.index(torch.arange(40.0).numpy().tobytes())
    file.write_bytes(whole[: place + 9] + b"\x55" + whole[place + 10 :])
    assert (
        soundness.damage(file) == "the checksum of its record 'checkpoint_last/data/0' does not fit"
    )


def test_a_file_that_is_cut_short(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        said = (
            "it is empty"
            if length == 0
            else "its end is missing or its table of contents is unreadable"
        )
        assert soundness.damage(file) == said


def test_other_files_have_no_checksums(file):
    file.write_bytes(b"text")
    assert soundness.damage(file) == soundness.NO_CHECKSUMS
    torch.save(STATE, file, _use_new_zipfile_serialization=False)
    assert soundness.damage(file) == soundness.NO_CHECKSUMS


def test_the_newest_sound_one_beside_it(file):
    assert soundness.newest_sound(file) is None and soundness.beside(file) == ""
    for age, name in enumerate(("checkpoint_2_20.pt", "checkpoint_best.pt", "checkpoint1.pt")):
        path = file.with_name(name)
        # the newest is cut short
        path.write_bytes(file.read_bytes() if age else file.read_bytes()[:-5])
        os.utime(path, (1e9 - age, 1e9 - age))
    file.with_name("crash.pt").write_bytes(file.read_bytes())
    assert soundness.newest_sound(file) == file.with_name("checkpoint_best.pt")
    assert (
        "the newest sound checkpoint beside it is checkpoint_best.pt: give that one"
        in soundness.beside(file)
    )


def test_the_newest_sound_one_has_made_the_most_updates(file):
    """Whatever the clock said when it was written."""
    for age, updates in enumerate((30, 40, 20)):
        path = file.with_name(f"checkpoint_2_{updates}.pt")
        torch.save(
            STATE | {"optimizer_history": [{"num_updates": 7}, {"num_updates": updates}]}, path
        )
        os.utime(path, (1e9 - age, 1e9 - age))
    # says no number, and is the last written
    file.with_name("checkpoint_other.pt").write_bytes(file.read_bytes())
    assert soundness.newest_sound(file) == file.with_name("checkpoint_2_40.pt")


def test_the_first_tensor_that_is_not_finite():
    state = {
        "model": {"a": torch.ones(3)},
        "moments": [{"m": torch.ones(2, 2)}, None, "text", 3.0, torch.tensor(1)],
    }
    assert soundness.not_finite(state) is None
    state["moments"][0]["m"][1] = float("inf")
    assert (
        soundness.not_finite(state, "file")
        == "file.moments.0.m holds 2 values of 4 that are NaN or infinite"
    )
    state["model"]["a"][0] = float("nan")
    assert soundness.not_finite(state) == "model.a holds 1 values of 3 that are NaN or infinite"


def test_a_large_sum_is_no_infinity():
    assert soundness.not_finite([torch.full((9,), 3e38)]) is None


FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy --task translation"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": {"w": [1.0]}}, "TypeError: w is of type list and no tensor"),
        ({"model": {"w": torch.ones(2, 2).to_sparse()}}, "TypeError: model.w is a sparse tensor"),
        (
            {"model": {"w": torch.zeros(1).expand(2**33)}},
            "ValueError: model.w has fewer values than its shape",
        ),
        ({"task_state": "x"}, "TypeError: task_state is of type str"),
        (
            {"last_optimizer_state": {"param_groups": [{"lr": [1]}]}},
            r"ValueError: lr of the optimizer is .1.",
        ),
        (
            {"last_optimizer_state": {"param_groups": [{"betas": [0.9, 2**64]}]}},
            "ValueError: betas of the optimizer",
        ),
        (
            {
                "last_optimizer_state": {
                    "state": {7: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(())}}
                }
            },
            "ValueError: the moments of parameter 7 have other types or shapes than one another",
        ),
        ({"last_optimizer_state": 3}, "TypeError: last_optimizer_state is of type int"),
        (
            {"optimizer_history": [{"best_loss": 1.0, "num_updates": "3"}]},
            "ValueError: num_updates is 3",
        ),
        ({"extra_state": {"train_iterator": {"epoch": 1.5}}}, "ValueError: epoch is 1.5"),
        (
            {"extra_state": {"train_iterator": {"iterations_in_epoch": -1}}},
            "ValueError: iterations_in_epoch is -1",
        ),
    ],
)
def test_parts_of_other_types_are_named(train, tmp_path, parts, said):
    torch.save(train(tmp_path, f"{FAIRSEQ} --max-update 1") | parts, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=rf"other.pt is not a checkpoint of fairseq's \({said}"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "other.pt"))
