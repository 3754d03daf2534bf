import pytest

from lsq.commands.prepare import Prepared, TextFiles
from lsq.commands.run_folder import RunFolder, check_data, check_name, named_options
from tests.commands.conftest import VOCABULARY

KEY = {"--lr": "1"}


@pytest.fixture
def folder(prepared, tmp_path) -> RunFolder:
    """A run that is not there yet."""
    moved = Prepared(files=prepared.files, output=tmp_path, options=prepared.options)
    return RunFolder(prepared=moved, name="mine")


def begin(folder: RunFolder, key: dict) -> None:
    """Claim it and leave a checkpoint."""
    folder.claim({**folder.prepared.settings, **key})
    folder.model.mark({}, finished=False)
    (folder.model.folder / "checkpoint_last.pt").write_text("x")


@pytest.mark.parametrize("name", ["mine", "int8", "a.b-c_1", "größe=2,x"])
def test_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../home", "/etc", "a/b", "a\0b", "-x", ".hidden", "a b", "x" * 201, "a\n"]
)
def test_names_that_leave_the_folder(name):
    with pytest.raises(ValueError, match="is not a plain folder name"):
        check_name(name)


@pytest.mark.parametrize("name", ["data", "text", "vocabulary", "numbers", "Data"])
def test_names_of_other_folders(name):
    with pytest.raises(ValueError, match="is the name of a folder of the data"):
        check_name(name)


def test_named_options():
    words = ["odd", "--a", "1", "-2", "--b", "--c=3", "--a", "4"]
    assert named_options(words) == {"": "odd", "--a": "4", "--b": None, "--c": "3"}


def test_other_options_are_refused_by_name(folder):
    settings = folder.prepared.settings
    begin(folder, KEY)
    folder.check({**settings, **KEY}, 5, overwrite=False)
    with pytest.raises(ValueError, match=r"other options \(--lr: 1 before, 2 now\).*--overwrite"):
        folder.check({**settings, "--lr": "2"}, 5, overwrite=False)
    folder.check({**settings, "--lr": "2"}, 5, overwrite=True)
    assert (folder.model.folder / "checkpoint_last.pt").exists()  # checking writes nothing
    folder.claim({**settings, "--lr": "2"})
    assert not folder.model.folder.exists()


def test_what_the_run_did_not_make_stays(folder):
    folder.path.mkdir()
    (folder.path / "thesis.txt").write_text("x")
    begin(folder, KEY)
    (folder.model.folder / "thesis.txt").write_text("x")
    folder.claim({**folder.prepared.settings, "--lr": "2"})
    assert (folder.path / "thesis.txt").exists() and (folder.model.folder / "thesis.txt").exists()
    assert not (folder.model.folder / "checkpoint_last.pt").exists()


@pytest.mark.parametrize("name", ["results.json", "model/checkpoint_best.pt", "translation/hypotheses.txt"])
def test_files_of_somebody_else_are_refused(folder, name):
    theirs = folder.path / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    with pytest.raises(ValueError, match=f"holds {theirs.name}, which this command did not make"):
        folder.check(KEY, 5, overwrite=True)
    assert theirs.read_text() == "x"


def test_fewer_updates_than_there_are(folder):
    begin(folder, KEY)
    (folder.model.folder / "losses.jsonl").write_text('{"kind": "train", "update": 20, "seconds": 1.0, "loss": 2.0}\n')
    key = {**folder.prepared.settings, **KEY}
    folder.check(key, 20, overwrite=False)
    with pytest.raises(ValueError, match=r"--updates is 10, but .*mine has made 20 already; give at least 20"):
        folder.check(key, 10, overwrite=False)
    folder.check(key, 10, overwrite=True)


def test_data_of_other_runs_stay(folder, files):
    begin(folder, KEY)
    check_data(folder.prepared)
    output = folder.prepared.output
    other = Prepared(
        files=TextFiles(train=files.valid, valid=files.valid, test=files.test), output=output, options=VOCABULARY
    )
    message = r"holds the data of the run mine, which were made with other options \(--src: .*train\.en .*--tgt: "
    for act in (
        lambda: check_data(other),
        lambda: RunFolder(prepared=other, name="new").check({**other.settings, **KEY}, 5, overwrite=True),
    ):
        with pytest.raises(ValueError, match=message):
            act()
    with pytest.raises(ValueError, match=r"other options \(--src: .*before, .*now"):
        RunFolder(prepared=other, name="mine").check({**other.settings, **KEY}, 5, overwrite=False)
    RunFolder(prepared=other, name="mine").check({**other.settings, **KEY}, 5, overwrite=True)
