import pytest
from fairseq import checkpoint_utils

from lsq.fairseq import save_folder
from lsq.files.lock import NAME, Busy, locked_folder


@pytest.fixture(autouse=True)
def released():
    yield
    save_folder.release()


def test_a_training_has_its_folder_alone(tmp_path):
    folder = tmp_path / "a" / "b"
    checkpoint_utils.verify_checkpoint_directory(str(folder))
    with pytest.raises(
        Busy, match=f"is writing into {folder}; wait for it, or choose another --save-dir"
    ):
        with locked_folder(folder, "choose another --save-dir"):
            pass
    save_folder.release()
    assert not (folder / NAME).exists()


def test_files_beside_the_checkpoints_stay(tmp_path):
    """fairseq writes and deletes a file of this name."""
    (tmp_path / "dummy").write_text("precious")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    save_folder.release()
    assert (tmp_path / "dummy").read_text() == "precious"


def test_another_training_in_the_same_process(tmp_path):
    for name in ("a", "a", "b"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / name))
    assert (tmp_path / "b" / NAME).exists() and not (tmp_path / "a").exists()
