import pytest

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
