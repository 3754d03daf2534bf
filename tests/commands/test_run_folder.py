import dataclasses

import pytest
import torch

from lsq.commands.run_folder import RunFolder, check_data, check_name
from lsq.commands.stages import MARKER, Stage

KEY = {"--lr": "1"}


@pytest.fixture
def folder(prepared, tmp_path) -> RunFolder:
    """A run that is not there yet."""
    return RunFolder(prepared=dataclasses.replace(prepared, output=tmp_path), name="mine")


def begin(folder: RunFolder, key: dict, updates: int = 5) -> None:
    """Claim it and leave a checkpoint of so many updates."""
    key = {**folder.prepared.settings, **key}
    folder.claim(key, 5)
    folder.model.mark({**key, "--max-update": 5}, finished=False)
    torch.save(
        {"optimizer_history": [{"num_updates": updates}]},
        folder.model.folder / "checkpoint_last.pt",
    )


@pytest.mark.parametrize("name", ["mine", "int8", "a.b-c_1", "größe=2,x"])
def test_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../home", "/etc", "a/b", "a\0b", "-x", ".hidden", "a b", "x" * 201, "a\n"],
)
def test_names_that_leave_the_folder(name):
    with pytest.raises(ValueError, match="is not a plain folder name"):
        check_name(name)


@pytest.mark.parametrize("name", ["data", "text", "vocabulary", "numbers", "Data"])
def test_names_of_other_folders(name):
    with pytest.raises(ValueError, match="is the name of a folder of the data"):
        check_name(name)


def test_other_options_are_refused_by_name(folder):
    settings = folder.prepared.settings
    begin(folder, KEY)
    folder.check({**settings, **KEY}, 5, overwrite=False)
    with pytest.raises(ValueError, match=r"other options \(--lr: 1 before, 2 now\).*--overwrite"):
        folder.check({**settings, "--lr": "2"}, 5, overwrite=False)
    folder.check({**settings, "--lr": "2"}, 5, overwrite=True)
    assert (folder.model.folder / "checkpoint_last.pt").exists()  # checking writes nothing
    folder.claim({**settings, "--lr": "2"}, 5)
    assert not folder.model.folder.exists()


def test_what_the_run_did_not_make_stays(folder):
    folder.path.mkdir()
    (folder.path / "thesis.txt").write_text("x")
    begin(folder, KEY)
    (folder.model.folder / "thesis.txt").write_text("x")
    folder.claim({**folder.prepared.settings, "--lr": "2"}, 5)
    assert (folder.path / "thesis.txt").exists() and (folder.model.folder / "thesis.txt").exists()
    assert not (folder.model.folder / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "name", ["results.json", "model/checkpoint_best.pt", "translation/hypotheses.txt"]
)
def test_files_of_somebody_else_are_refused(folder, name):
    theirs = folder.path / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    with pytest.raises(ValueError, match=f"holds {theirs.name}, which this command did not make"):
        folder.check(KEY, 5, overwrite=True)
    assert theirs.read_text() == "x"


def test_fewer_updates_than_there_are(folder):
    begin(folder, KEY, updates=20)
    key = {**folder.prepared.settings, **KEY}
    folder.check(key, 20, overwrite=False)
    with pytest.raises(
        ValueError, match=r"--updates is 10, but .*mine has made 20 already; give at least 20"
    ):
        folder.check(key, 10, overwrite=False)
    folder.check(key, 10, overwrite=True)
    folder.claim(key, 10)
    assert folder.updates() == 0


def test_a_model_without_its_runs_marker_is_not_gone_on_with(folder):
    begin(folder, KEY)
    (folder.path / MARKER).unlink()
    with pytest.raises(ValueError, match=r"other options \(--lr: 1 before, 2 now\)"):
        folder.check({**folder.prepared.settings, "--lr": "2"}, 5, overwrite=False)


def test_a_run_without_a_checkpoint_binds_nobody(folder):
    begin(folder, KEY)
    (folder.model.folder / "checkpoint_last.pt").unlink()
    folder.check({**folder.prepared.settings, "--lr": "2"}, 5, overwrite=False)


def test_what_a_run_starts_from_is_not_removed(folder):
    begin(folder, KEY)
    source = str(folder.model.folder / "checkpoint_last.pt")
    with pytest.raises(
        ValueError, match=f"--lsq-from {source} is of the run that --overwrite removes"
    ):
        folder.check({**folder.prepared.settings, **KEY, "--lsq-from": source}, 5, overwrite=True)


def test_copies_that_the_user_made_stay(folder):
    begin(folder, KEY)
    for name in ("checkpoint_paper.pt", "checkpoint_last.pt.bak", "checkpoint_12_x.pt"):
        (folder.model.folder / name).write_text("x")
    for name in (
        "checkpoint3.pt",
        "checkpoint_3_20.pt",
        "checkpoint.best_loss_3.10.pt",
        "checkpoint_best.pt",
    ):
        (folder.model.folder / name).write_text("x")
    folder.claim({**folder.prepared.settings, "--lr": "2"}, 5)
    left = {path.name for path in folder.model.folder.iterdir()}
    assert left == {"checkpoint_paper.pt", "checkpoint_last.pt.bak", "checkpoint_12_x.pt"}


def test_data_of_other_runs_stay(folder, files):
    begin(folder, KEY)
    check_data(folder.prepared)
    other = dataclasses.replace(folder.prepared, files=files | {"train": files["valid"]})
    message = (
        r"holds the data of the run mine, which were made with other options \(--src:"
        r" .*train\.en .*--tgt: "
    )
    for act in (
        lambda: check_data(other),
        lambda: RunFolder(prepared=other, name="new").check(
            {**other.settings, **KEY}, 5, overwrite=True
        ),
    ):
        with pytest.raises(ValueError, match=message):
            act()
    with pytest.raises(ValueError, match=r"other options \(--src: .*before, .*now"):
        RunFolder(prepared=other, name="mine").check({**other.settings, **KEY}, 5, overwrite=False)
    RunFolder(prepared=other, name="mine").check({**other.settings, **KEY}, 5, overwrite=True)


def test_other_folders_of_the_output_are_no_runs(folder):
    """What a killed preparation left, and a copy of the data."""
    for name in (".text.partial", "data-backup"):
        Stage(name="data", folder=folder.prepared.output / name, makes=()).mark({}, finished=False)
    check_data(folder.prepared)
