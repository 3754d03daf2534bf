import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from filelock import FileLock

from lsq.files.lock import NAME, Busy, locked, locked_file, locked_folder


def test_the_second_one_is_told_who_holds_it(tmp_path):
    folder = tmp_path / "runs"
    with locked_folder(folder, "choose another --output"):
        with pytest.raises(
            Busy,
            match=rf"process {os.getpid()} on .*, since .* is writing into {folder}; wait for it",
        ):
            with locked_folder(folder, "choose another --output"):
                pass
        with locked_file(folder / "plan.json", "x"):  # another lock of the same folder
            pass
    with locked_folder(folder, "x"):
        pass


def test_nothing_is_left_behind(tmp_path):
    with pytest.raises(ValueError, match="refused"), locked_folder(tmp_path / "a" / "b", "x"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []
    with locked_folder(tmp_path / "kept", "x"):
        (tmp_path / "kept" / "file").write_text("x")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def _hold(folder, ready):
    with locked_folder(folder, "x"):
        ready.set()
        time.sleep(60)


def test_the_lock_falls_with_its_process(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready))
    other.start()
    try:
        assert ready.wait(20)
        with (
            pytest.raises(Busy, match=f"process {other.pid} on"),
            locked_folder(tmp_path, "x", seconds=0.1),
        ):
            pass
    finally:
        other.kill()
        other.join()
    assert (tmp_path / NAME).exists()
    with locked_folder(tmp_path, "x"):
        assert f"process {os.getpid()} on" in (tmp_path / NAME).read_text()


def test_a_lock_that_is_removed_while_it_is_waited_for_does_not_count(tmp_path, monkeypatch):
    """Its holder removes the file after this process opened it: the lock of the old file locks
    nothing."""
    path, flock, turns = tmp_path / "lock", fcntl.flock, []

    def remove_first(file, operation):
        if not turns:
            path.unlink()
        turns.append(1)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(path, "it", "x", seconds=1.0):
        assert len(turns) == 2 and path.exists()
        with pytest.raises(Busy), locked(path, "it", "x"):
            pass


def test_a_file_system_without_locks_is_told_once(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with locked_folder(tmp_path, "x"):
                pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} cannot be locked (No locks available): do not let two processes write there at"
        " a time"
    ]


def test_links_and_files_of_somebody_else_stay(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / NAME).symlink_to(theirs)
    with pytest.raises(OSError), locked_folder(tmp_path, "x"):
        pass
    (tmp_path / "poetry.lock").write_text("precious")
    with (
        pytest.raises(FileExistsError, match="poetry.lock is no lock of lsq's"),
        locked_file(tmp_path / "poetry", "x"),
    ):
        pass
    assert theirs.read_text() == (tmp_path / "poetry.lock").read_text() == "precious"


def _fork_and_die(folder, ready):
    with locked_folder(folder, "x"):
        if os.fork() == 0:  # as a data loader, which lives on for seconds
            time.sleep(20)
            os._exit(0)
        ready.set()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_falls_although_a_forked_process_lives_on(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_fork_and_die, args=(tmp_path, ready))
    other.start()
    assert ready.wait(20)
    other.join()
    with locked_folder(tmp_path, "x"):
        pass


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def full(path, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{NAME}'"):
        with locked_folder(tmp_path, "x"):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["acquire", "release"])
def test_a_signal_leaves_no_lock(tmp_path, monkeypatch, step):
    """Ctrl-C comes while the lock is taken, or while it falls: between two of Python's steps, the
    worst of places."""
    whole = getattr(FileLock, step)

    def interrupted(self, *arguments, **options):
        found = whole(self, *arguments, **options)
        if not came:
            came.append(step)
            signal.raise_signal(signal.SIGINT)
        return found

    came, handler = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(FileLock, step, interrupted)
    with pytest.raises(KeyboardInterrupt), locked_folder(tmp_path / "runs", "x"):
        assert step == "release"
    assert came and not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGINT) is handler
    with locked_folder(tmp_path / "runs", "x"):
        pass


def test_no_signal_is_lost_that_comes_while_handlers_are_put_back(tmp_path, monkeypatch):
    """Ctrl-C, before SIGTERM has its handler again."""
    came, put, before = [], signal.signal, signal.getsignal(signal.SIGTERM)

    def handle(number, frame):
        came.append(number)

    def interrupted(number, handler):
        put(number, handler)
        if handler is signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)

    try:
        put(signal.SIGTERM, handle)
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt), locked_folder(tmp_path, "x"):
                pass
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        put(signal.SIGTERM, before)


def test_waiting_for_a_lock_can_be_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    with locked_folder(tmp_path, "x"):
        with pytest.raises(KeyboardInterrupt), locked_folder(tmp_path, "x", seconds=60.0):
            pass
        assert (tmp_path / NAME).exists()
