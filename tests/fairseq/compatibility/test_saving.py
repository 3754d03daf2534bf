from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lsq import files
from lsq.fairseq.compatibility import CheckpointNotWritten


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


def test_links_and_files_of_somebody_else_stay(tmp_path):
    path, theirs = tmp_path / "checkpoint_last.pt", tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "checkpoint_last.pt.tmp").write_text("precious, too")
    (tmp_path / ".checkpoint_last.pt.partial").symlink_to(theirs)
    with pytest.raises(CheckpointNotWritten):
        checkpoint_utils.torch_persistent_save({"x": 1}, str(path))
    checkpoint_utils.torch_persistent_save({"x": 1}, str(path))
    assert theirs.read_text() == "precious" and not path.is_symlink()
    assert (tmp_path / "checkpoint_last.pt.tmp").read_text() == "precious, too"


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
