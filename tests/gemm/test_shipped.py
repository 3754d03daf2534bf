"""The files in the package: sound, and of the keys that are looked up."""

import pytest

from lsq.gemm import configuration_file

FILES = sorted(configuration_file.PACKAGE_FOLDER.glob("*.json"))


def test_there_are_files():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_sound(path):
    file = configuration_file.read(path)
    assert file.entries
    assert all(entry.key == entry.key.rounded() for entry in file.entries)
    # A file may keep the default, but it never holds anything slower.
    assert all(entry.times.chosen <= entry.times.default for entry in file.entries)
