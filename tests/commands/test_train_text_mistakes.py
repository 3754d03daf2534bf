"""What `lsq train-text` refuses, and that nothing is lost or written by it."""

import os

import pytest

from lsq.commands import train_text
from lsq.files.lock import Busy, locked_folder
from tests.commands.small_runs import files_in, results_of


def test_wrong_options_remove_nothing_and_bind_nobody(command, tmp_path):
    train_text.run(command("--updates", "1"))
    before = files_in(tmp_path / "out")
    wrong = "--heads 3", "--lsq-bits 9", "--lr nan", "--lsq-from nowhere.pt", "-- --no-such-option"
    for options in map(str.split, wrong):
        with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
            train_text.run(command("--updates", "1", "--overwrite", *options))
        assert files_in(tmp_path / "out") == before, options
        with pytest.raises((ValueError, FileNotFoundError, SystemExit)):
            train_text.run(command("--updates", "1", "--name", "new", *options))
        assert not (tmp_path / "out" / "new").exists(), options


def test_names_do_not_leave_the_output_folder(command, tmp_path):
    thesis = tmp_path / "home" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("x")
    for name in ("../home", "..", "data", str(tmp_path / "home")):
        with pytest.raises(ValueError, match="--name"):
            train_text.run(command("--updates", "2", "--name", name, "--overwrite"))
    assert thesis.exists() and not (tmp_path / "out").exists()


def test_folders_of_somebody_else_stay(command, tmp_path):
    theirs = tmp_path / "out" / "data" / "dict.src.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    with pytest.raises(ValueError, match="holds dict.src.txt, which this command did not make"):
        train_text.run(command("--updates", "2", "--overwrite"))
    assert files_in(tmp_path / "out") == {"data/dict.src.txt": b"x"}


def test_options_that_do_not_fit_are_refused_before_anything_is_written(command, tmp_path):
    train_text.run(command("--updates", "1", "--mode", "float"))
    before = files_in(tmp_path / "out")
    message = r"holds a run with other options \(--vocabulary-size: 60 before, 70 now\)"
    with pytest.raises(ValueError, match=message):
        train_text.run(command("--updates", "1", "--mode", "float", "--vocabulary-size", "70"))
    for options in (
        ["--mode", "int8", "--updates", "1"],
        ["--updates", "1", "--overwrite"],
        ["--prepare-only"],
    ):
        with pytest.raises(
            ValueError, match=r"the data of the run float, .*--vocabulary-size: 60 before, 70 now"
        ):
            train_text.run(command(*options, "--vocabulary-size", "70"))
    assert files_in(tmp_path / "out") == before
    train_text.run(
        command("--updates", "1", "--mode", "float", "--vocabulary-size", "70", "--overwrite")
    )
    assert results_of(tmp_path / "out" / "float")["options"]["--vocabulary-size"] == 70


def test_a_second_writer_is_refused(command, tmp_path):
    with locked_folder(tmp_path / "out" / "float", "x"):
        with pytest.raises(
            Busy, match=rf"process {os.getpid()} on .* is writing into .*float; .*another --name"
        ):
            train_text.run(command("--updates", "1", "--mode", "float"))
    with locked_folder(tmp_path / "out", "x"):
        with pytest.raises(Busy, match=r"is writing into .*out; .*another --output"):
            train_text.run(command("--prepare-only"))
    assert not (tmp_path / "out").exists()


def test_changed_options_need_another_name_or_overwrite(command, tmp_path):
    arguments = command("--updates", "2", "--mode", "float")
    assert train_text.run(arguments) == 0
    changed = [*arguments, "--lr", "0.01"]
    with pytest.raises(
        ValueError, match=r"other options \(--lr: 0.001 before, 0.01 now\); choose another --name"
    ):
        train_text.run(changed)
    assert train_text.run([*changed, "--overwrite"]) == 0
    assert results_of(tmp_path / "out" / "float")["options"]["--lr"] == "0.01"
    assert train_text.run([*changed, "--beam", "1"]) == 0  # translates again, trains no more
    log = (tmp_path / "out" / "float" / "model" / "train.log").read_text()
    assert log.count("begin training epoch 1") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "int8", "--arch", "transformer"], "--arch transformer has no quantisers"),
        (["--mode", "float", "--lsq-bits", "4"], "--arch transformer has no quantisers"),
        (
            ["--max-tokens", "40"],
            "--max-tokens 40 is too small for sentences of --max-length 40 .* at least 41",
        ),
        (["--output", "a:b"], "--output a:b has a name that fairseq takes for"),
        (["--output", "${x}"], "has a name that fairseq takes for"),
        (
            ["--", "--max-update", "9"],
            "--max-update after -- is set by lsq train-text itself; .* give --updates",
        ),
        (["--", "--save-dir=x"], "--save-dir after -- .* give --output and --name"),
        (["--mode", "int8", "--lsq-bits", "9"], "bits is 9"),
        (["--hidden", "24"], "hidden is 24, but int8 products need a multiple of 16; use 32"),
        (["--heads", "3"], "hidden size 16 is not divisible by 3 heads"),
        (["--src", "nowhere.en"], "there is no file nowhere.en"),
        (["--src", os.devnull], "/dev/null is not a file"),
        (["--vocabulary-size", "5000"], "--vocabulary-size 5000 is too large"),
    ],
)
def test_mistakes(command, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_text.run(command("--updates", "1", *options))


@pytest.mark.parametrize("option", ["--src", "--tgt", "--valid-src", "--test-tgt"])
def test_empty_files_are_called_empty(command, tmp_path, option):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty; it must hold one sentence a line"):
        train_text.run(command("--updates", "1", option, str(tmp_path / "empty")))


def test_half_a_pair_of_files(files, tmp_path):
    given = [
        "--src",
        str(files["train"][0]),
        "--tgt",
        str(files["train"][1]),
        "--output",
        str(tmp_path),
    ]
    with pytest.raises(ValueError, match="--test-src and --test-tgt go together"):
        train_text.run([*given, "--test-src", str(files["test"][0])])


def test_unknown_options(command, capsys):
    for arguments in (
        command("--learning-rate", "1"),
        command("--updates", "1", "--", "--no-such-option"),
    ):
        with pytest.raises(SystemExit) as stopped:
            train_text.run(arguments)
        assert stopped.value.code == 2
        assert "unrecognized arguments: --" in capsys.readouterr().err
