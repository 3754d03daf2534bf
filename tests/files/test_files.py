import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from lsq import files
from lsq.files import write_text


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError):
        files.write(path, lambda file: file.write(b"new") / 0)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_what_is_no_text_is_escaped(tmp_path):
    """As names of files are that are not UTF-8; in JSON it is read as it was."""
    name, path = os.fsdecode(b"\xff\xc3\xa9.csv"), tmp_path / "file.json"
    write_text(path, json.dumps({"name": name}, ensure_ascii=False))
    assert path.read_text() == '{"name": "\\udcff\xe9.csv"}'
    assert json.loads(path.read_text()) == {"name": name}


def test_a_name_that_other_libraries_cannot_open_is_refused():
    files.check_name("caf\xe9")
    with pytest.raises(
        ValueError, match=r"the name .*\udcff is not UTF-8, and PyTorch and sent.*; rename it"
    ):
        files.check_name(Path(os.fsdecode(b"runs/\xff")))


def test_other_files_beside_it_stay(tmp_path):
    (tmp_path / "file.txt.tmp").write_text("somebody's")
    write_text(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt.tmp").read_text() == "somebody's"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("module, stage", [(files, "open_partial"), (os, "fsync"), (os, "replace")])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, module, stage, late):
    path, step = tmp_path / "file.txt", getattr(module, stage)
    path.write_text("old")

    def die(*arguments, **options):
        if late:
            step(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    process = os.fork()
    if process == 0:
        setattr(module, stage, die)
        files.write(path, lambda file: file.write(b"new"))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert path.read_text() == ("new" if (stage, late) == ("replace", True) else "old")
    files.write(path, lambda file: file.write(b"newer"))
    assert path.read_text() == "newer" and list(tmp_path.iterdir()) == [path]


def contents(folder):
    """Every file in a folder, hidden ones as well."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    for before in ({}, {"model/a": "1", "model/b": "2"}):
        for name, text in before.items():
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        with pytest.raises(KeyboardInterrupt):
            files.write_folder(tmp_path / "model", fail)
        assert contents(tmp_path) == before
    files.write_folder(tmp_path / "model", lambda folder: (folder / "a").write_text("3"))
    assert contents(tmp_path) == {"model/a": "3"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_does_not_take_the_place_of_a_file(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="this is a file.*name another: .*model"):
        files.write_folder(tmp_path / "model", lambda folder: None)
    assert contents(tmp_path) == {"model": "mine"}


@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_writer_of_a_folder_left(tmp_path, there):
    """It was killed between the two renames, or behind them."""
    path, left = tmp_path / "model", tmp_path / f".model.old{files.PARTIAL}"
    for folder in (left, tmp_path / f".model.new{files.PARTIAL}", *([path] if there else [])):
        folder.mkdir()
        (folder / "a").write_text(folder.name)

    def fail(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        files.write_folder(path, fail)
    assert contents(tmp_path) == {"model/a": path.name if there else left.name}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_folder_survives_a_signal_between_the_renames(tmp_path, monkeypatch, stage):
    path, rename, count = tmp_path / "model", Path.rename, itertools.count(1)
    path.mkdir()
    (path / "a").write_text("old")

    def interrupted(self, target):
        rename(self, target)
        if next(count) == stage:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_folder(path, lambda folder: (folder / "a").write_text("new"))
    assert contents(tmp_path) == {"model/a": "old" if stage == 1 else "new"}


def test_a_link_to_a_folder_is_replaced_each_time(tmp_path):
    path, real = tmp_path / "model", tmp_path / "real"
    real.mkdir()
    (real / "a").write_text("somebody's")
    path.symlink_to(real)
    for text in ("1", "2"):
        files.write_folder(path, lambda folder, text=text: (folder / "a").write_text(text))
        assert contents(tmp_path) == {"model/a": text, "real/a": "somebody's"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "real"}
