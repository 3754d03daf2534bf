import os
import signal

import pytest

from lsq import files
from lsq.files import write_text


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


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
