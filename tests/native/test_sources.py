"""Libraries that are damaged or of other sources are refused before loading them, which may end the
process."""

import shutil
from pathlib import Path

import pytest

from lsq.native import loader, runtime, sources
from lsq.native.sources import LibraryError


def built() -> Path:
    """The library that runs here."""
    return Path(loader.library()._name)


def test_what_is_sealed_is_whole_until_it_changes():
    content = sources.sealed(b"machine code")
    assert sources.unsealed(content)
    assert (
        not sources.unsealed(b"")
        and not sources.unsealed(sources.sealed(b""))
        and not sources.unsealed(b"x" * 32)
    )
    for place in range(len(content)):
        assert not sources.unsealed(content[:place])
        assert not sources.unsealed(
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:5000] + bytes(100) + content[5100:],
        lambda content: b"this is text",
        lambda content: content[:-32],
    ],
    ids=["empty", "half", "last byte", "zeros", "text", "of an earlier version"],
)
def test_a_damaged_library_is_named_with_the_remedy(tmp_path, damage):
    path = tmp_path / "libcpu_v1.so"
    path.write_bytes(damage(built().read_bytes()))
    with pytest.raises(
        LibraryError, match="libcpu_v1.so is damaged, or was not built by this .*`make library`"
    ):
        sources.load(path, "cpu")


def test_the_loader_and_the_launcher_look_before_they_load(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_FOLDER", tmp_path)
    monkeypatch.setattr(runtime, "LIBRARY", tmp_path / "libruntime.so")
    for path in (tmp_path / built().name, runtime.LIBRARY):
        path.write_bytes(built().read_bytes()[:100_000])
    with pytest.raises(LibraryError, match=f"{built().name} is damaged"):
        loader._load()
    with pytest.raises(LibraryError, match="libruntime.so is damaged"):
        runtime.library.__wrapped__()


def test_a_whole_copy_is_loaded(tmp_path):
    path = shutil.copy(built(), tmp_path / "libcpu_v1.so")
    assert sources.load(Path(path), "cpu").lsq_sources() == sources.checksum("cpu") % 2**32
