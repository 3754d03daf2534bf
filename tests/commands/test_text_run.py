"""A run of `lsq train-text`: its options, its folder, and its stages."""

import dataclasses
import os
import signal
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from lsq.commands import text_run
from lsq.commands.interruption import Interrupted
from lsq.commands.stages import MARKER, Stage
from lsq.commands.text_run import (
    RunFolder,
    RunOptions,
    bound,
    check_data,
    check_name,
    named_options,
)
from tests.commands.conftest import SIZES


def options(training=None, extra=(), **given) -> RunOptions:
    defaults = {"name": "x", "updates": 3, "beam": 1, "overwrite": False, "quiet": True}
    return RunOptions(given=Namespace(**(defaults | given)), training=training or {}, extra=extra)


def test_options_that_bind_a_run():
    training = {"--arch": "transformer", "--share-all-embeddings": None, "--lr": "0.1"}
    found = options(training=training, extra=["--fp16"]).arguments(Path("data"), Path("model"))
    assert " ".join(found) == (
        "data --save-dir model --distributed-world-size 1 --arch transformer"
        " --share-all-embeddings --lr 0.1 --max-update 3 --fp16"
    )
    words = ["odd", "--a", "1", "-2", "--b", "--c=3", "--a", "4"]
    assert named_options(words) == {"": "odd", "--a": "4", "--b": None, "--c": "3"}
    training |= {"--log-interval": "1", "--encoder-layers": "3", "--decoder-layers": "3"}
    extra = ["--lr", "0.2", "--num-workers", "3", "--encoder-normalize-before"]
    assert bound(training, extra) == {
        "--arch": "transformer",
        "--share-all-embeddings": True,
        "--lr": "0.2",
        "--encoder-normalize-before": True,
        "--layers": "3",
    }


def test_a_file_of_formats_binds_a_run_by_its_text(tmp_path):
    path = tmp_path / "weight_format.txt"
    for text in ("int8", "int8,*fc2*=int4"):
        path.write_text(text + "\n")
        for given in (["--lsq-weight-format", f"@{path}"], [f"--lsq-weight-format=@{path}"]):
            assert bound({}, given) == {"--lsq-weight-format": text}
        assert bound({"--lsq-weight-format": f"@{path}"}, []) == {"--lsq-weight-format": text}


def test_a_signal_during_the_translation_leaves_the_training(prepared, monkeypatch):
    """A finished run is neither trained nor translated again."""
    for name in ("check_training", "train_model"):
        monkeypatch.setattr(text_run, name, lambda *_: None)
    monkeypatch.setattr(text_run, "translate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match=str(128 + signal.SIGTERM)) as stopped:
        text_run.run(prepared, options(updates=1))
    assert stopped.value.message == "stopped by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setattr(text_run, "train_model", None)  # would fail if it were called
    monkeypatch.setattr(text_run, "translate", lambda *_: None)
    monkeypatch.setattr(text_run, "report", lambda *_: {})
    assert text_run.run(prepared, options(updates=1)) == {}
    monkeypatch.setattr(text_run, "translate", None)
    assert text_run.run(prepared, options(updates=1)) == {}


def test_what_is_decoded_is_said_at_the_start(prepared, monkeypatch, capsys):
    for name in ("train_model", "translate", "report"):
        monkeypatch.setattr(text_run, name, lambda *_: None)
    training = {"--arch": "lsq_transformer", "--max-tokens": "100", "--cpu": None}
    training["--lsq-weight-format"] = "nvfp4"
    small = [word for word in SIZES if word not in ("--dropout", "0.1")]
    text_run.run(prepared, options(training=training, extra=small, name="decoded"))
    said = "decoded: multiplied as decoded values, no faster than floats: nvfp4 (12 weights)"
    assert said in capsys.readouterr().out


def test_the_translation_computes_where_the_training_did(prepared, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(text_run.generate, "run", seen.append)
    monkeypatch.setattr(text_run.generate, "read_hypotheses", lambda *_: [])
    for training in (
        {},
        {"--cpu": None},
        {"--cpu": None, "--lsq-device": "emulator", "--lsq-activations": "bfloat16"},
    ):
        text_run.translate(prepared, options(training=training, max_length=40), tmp_path, tmp_path)
        assert seen[-1][seen[-1].index(str(prepared.vocabulary)) + 1 :] == [
            word for option in training.items() for word in option if word is not None
        ]


# The folder of a run

KEY = {"--lr": "1"}


@pytest.fixture
def folder(prepared, tmp_path) -> RunFolder:
    return RunFolder(prepared=dataclasses.replace(prepared, output=tmp_path), name="mine")


def begin(folder: RunFolder, key: dict, updates: int = 5) -> None:
    key = {**folder.prepared.settings, **key}
    folder.claim(key, 5)
    folder.model.mark({**key, "--max-update": 5}, finished=False)
    state = {"optimizer_history": [{"num_updates": updates}]}
    torch.save(state, folder.model.folder / "checkpoint_last.pt")


def check(folder: RunFolder, lr: str, updates: int = 5, overwrite: bool = False, **key) -> None:
    folder.check({**folder.prepared.settings, "--lr": lr, **key}, updates, overwrite=overwrite)


OTHER_OPTIONS = r"other options \(--lr: 1 before, 2 now\)"


def test_names():
    for name in ("mine", "int8", "a.b-c_1", "größe=2,x"):
        assert check_name(name) == name
    outside = ["", ".", "..", "../home", "/etc", "a/b", "a\0b", "-x", ".hidden", "a b", "a\n"]
    outside = dict.fromkeys([*outside, "x" * 201], "is not a plain folder name")
    data = dict.fromkeys("data text vocabulary numbers Data".split(), "is the name of a folder of")
    for name, message in (outside | data).items():
        with pytest.raises(ValueError, match=message):
            check_name(name)


def test_other_options_are_refused_by_name_and_only_what_a_run_made_is_removed(folder):
    folder.path.mkdir()
    (folder.path / "thesis.txt").write_text("x")
    begin(folder, KEY)
    copies = "thesis.txt checkpoint_paper.pt checkpoint_last.pt.bak checkpoint_12_x.pt".split()
    made = "checkpoint3.pt checkpoint_3_20.pt checkpoint.best_loss_3.10.pt checkpoint_best.pt"
    for name in (*copies, *made.split()):
        (folder.model.folder / name).write_text("x")
    check(folder, "1")
    with pytest.raises(ValueError, match=f"{OTHER_OPTIONS}.*--overwrite"):
        check(folder, "2")
    check(folder, "2", overwrite=True)
    assert (folder.model.folder / "checkpoint_last.pt").exists()  # checking writes nothing
    folder.claim({**folder.prepared.settings, "--lr": "2"}, 5)
    assert {path.name for path in folder.model.folder.iterdir()} == set(copies)
    assert (folder.path / "thesis.txt").exists()


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


def test_a_model_binds_by_its_checkpoint(folder):
    """Without its run's marker, too."""
    begin(folder, KEY, updates=20)
    check(folder, "1", updates=20)
    message = r"--updates is 10, but .*mine has made 20 already; give at least 20"
    with pytest.raises(ValueError, match=message):
        check(folder, "1", updates=10)
    check(folder, "1", updates=10, overwrite=True)
    (folder.path / MARKER).unlink()
    with pytest.raises(ValueError, match=OTHER_OPTIONS):
        check(folder, "2")
    source = str(folder.model.folder / "checkpoint_last.pt")
    message = f"--lsq-from {source} is of the run that --overwrite removes"
    with pytest.raises(ValueError, match=message):
        check(folder, "1", overwrite=True, **{"--lsq-from": source})
    folder.claim({**folder.prepared.settings, **KEY}, 10)
    assert folder.updates() == 0
    check(folder, "2")


def test_data_of_other_runs_stay(folder, files):
    begin(folder, KEY)
    for name in (".text.partial", "data-backup"):  # of a killed preparation, and a copy
        Stage(name="data", folder=folder.prepared.output / name, makes=()).mark({}, finished=False)
    check_data(folder.prepared)
    other = dataclasses.replace(folder.prepared, files=files | {"train": files["valid"]})
    message = r"the data of the run mine, .* other options \(--src: .*train\.en .*--tgt: "
    new, mine = (RunFolder(prepared=other, name=name) for name in ("new", "mine"))
    for act in (lambda: check_data(other), lambda: check(new, "1", overwrite=True)):
        with pytest.raises(ValueError, match=message):
            act()
    with pytest.raises(ValueError, match=r"other options \(--src: .*before, .*now"):
        check(mine, "1")
    check(mine, "1", overwrite=True)
