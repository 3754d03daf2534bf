"""Files are read as they were written; whatever else stands there is one ValueError that says
where, or means the same.

tests/fuzz/test_json.py reads 1,000 mutations of such files, and tests/files what no JSON is.
"""

import dataclasses
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from lsq.files import json_file
from lsq.gemm import configuration_file
from lsq.gemm.configuration_file import ConfigurationFile, difference, read, write
from tests.gemm.tuned import GPU, TIMES, Machine, cublas, cublas_entry, entry, file, tile

TILES = file(entry(8), entry(1024), entry(op="project_weight_gradient", m=512, k=4096))
FILE = file(
    entry(8),
    cublas_entry(),
    cublas_entry(m=4096, n=1024, k=1024),
    entry(2, configuration=cublas()),
    entry(configuration=tile(), times=dataclasses.replace(TIMES, other=90.0)),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.json"


@pytest.mark.parametrize("wanted", [FILE, TILES, file()])
def test_round_trip(path, wanted):
    write(path, wanted)
    assert read(path) == wanted
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def changed(value, *places):
    """The file's content with `value` at a place; DELETE: without it."""
    content = contents(TILES)
    inner = content
    for place in places[:-1]:
        inner = inner[place]
    if value is DELETE:
        del inner[places[-1]]
    else:
        inner[places[-1]] = value
    return json.dumps(content)


DELETE = object()


def contents(wanted: ConfigurationFile):
    """What stands in a file."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "file.json"), wanted)
        return json.loads(Path(folder, "file.json").read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON (line 1, column 2"),
        ("{}", "the content has no field 'validators'; needed: validators, entries"),
        ('{"a": NaN}', "NaN is no number in these files"),
        ('{"a": -Infinity}', "-Infinity is no number in these files"),
        ('{"a": 1, "a": 2}', "the field 'a' stands twice in one object"),
        (changed(1, "\ud800"), r"the content has the unknown field '\ud800'"),
        (
            changed(2, "validators", "format"),
            "validators.format is 2; this version of lsq reads format 3",
        ),
        (
            changed(DELETE, "validators", "format"),
            "validators.format is None; this version of lsq reads format 3",
        ),
        (changed("tpu", "validators", "kind"), "validators.kind is 'tpu'; allowed: 'cuda'"),
        (
            changed("cpu", "validators", "kind"),
            "validators.kind is 'cpu', but products of CPUs run by a rule: leave the file out",
        ),
        (changed(7, "validators", "device"), "validators.device is 7; it must be a printable text"),
        (
            changed(1e3, "entries", 1, "key", "m"),
            "entries[1].key.m is 1000.0; it must be a whole number",
        ),
        (changed(1000, "entries", 1, "key", "m"), "entries[1].key is project 1000 x 128 x 256"),
        (
            changed(DELETE, "entries", 0, "key", "n"),
            "entries[0].key has no field 'n'; needed: m, n, k",
        ),
        (
            changed("x", "entries", 0, "configuration", "warps"),
            "entries[0].configuration has the unknown field 'warps'; allowed: rows, columns,",
        ),
        (
            changed(-1.0, "entries", 0, "times", "float"),
            "entries[0].times.float is -1.0; it must be a finite number",
        ),
        (
            changed("today", "entries", 0, "date"),
            "entries[0].date is 'today'; it must be a time in UTC",
        ),
    ],
    ids=lambda text: text[:40].replace("\ud800", ""),
)
def test_damaged_files_say_what_is_wrong(path, text, message):
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert str(raised.value).endswith("(correct or delete the file)")


def test_infinite_times(path):
    write(path, TILES)
    path.write_text(path.read_text().replace("80.0", "1e400"))
    with pytest.raises(
        ValueError, match=r"entries\[0\].times.chosen is inf; it must be a finite number"
    ):
        read(path)


@pytest.mark.parametrize(
    "digits", ["zz" * 64, "00" * 63, "00" * 65, "0" * 127 + " ", "٠" * 128, 5, None]
)
def test_algorithms_are_hexadecimal(path, digits):
    content = contents(FILE)
    content["entries"][2]["configuration"]["algorithm"] = digits
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"configuration.algorithm is .*; it must be 128 hexadecimal digits"
    ):
        read(path)


def test_not_text(path):
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"this is no text in UTF-8 \(byte 0\)"):
        read(path)


def test_too_large(path):
    path.write_bytes(b" " * (json_file.LARGEST_FILE + 1))
    with pytest.raises(ValueError, match="the file is larger than 16777216 bytes"):
        read(path)
    path.write_bytes(b" " * json_file.LARGEST_FILE)
    with pytest.raises(ValueError, match="this is not JSON"):
        read(path)


def test_not_a_file(path):
    with pytest.raises(FileNotFoundError):
        read(path)
    path.mkdir()
    with pytest.raises(ValueError, match="this is not a regular file"):
        read(path)
    os.mkfifo(path.with_name("pipe"))
    with pytest.raises(ValueError, match="this is not a regular file"):
        read(path.with_name("pipe"))


def test_a_file_sorts_its_entries():
    assert file(entry(9), entry(8)) == file(entry(8), entry(9))
    assert [each.key.m for each in file(entry(100), entry(9)).entries] == [9, 100]


def test_a_file_refuses_duplicates():
    with pytest.raises(
        ValueError, match=r"^entries\[2\].key is project 8 x .*, which entries\[0\] has already"
    ):
        file(entry(8), entry(9), entry(8))


def test_with_entries():
    changed = entry(8, configuration=tile())
    assert file(entry(8), entry(9)).with_entries([changed, entry(10)]) == file(
        changed, entry(9), entry(10)
    )


OTHER = dataclasses.replace(GPU, device="Other GPU")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_files_of_the_user_and_of_the_package_are_searched_in_order(machine):
    assert configuration_file.search(GPU) == []
    second, first = machine.add(machine.user, "b"), machine.add(machine.user, "a")
    (machine.user / "a.json.tmp").write_text("")
    (machine.user / "notes.txt").write_text("")
    last = machine.add(machine.package, "a")
    found = configuration_file.search(GPU)
    assert [each.path for each in found] == [first, second, last]
    assert [each.shipped for each in found] == [False, False, True]


def test_user_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert configuration_file.user_folder() == tmp_path / "lsq" / "gemm"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert configuration_file.user_folder() == tmp_path / ".config" / "lsq" / "gemm"


def test_no_home(monkeypatch):
    def nobody():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(configuration_file.Path, "home", nobody)
    assert configuration_file.user_folder() is None
    assert configuration_file.search(GPU) == []


def test_every_file_is_judged(machine):
    machine.add(machine.user, "a", entry())
    machine.add(machine.user, "b", entry(), validators=OTHER)
    machine.add(machine.user, "c", entry(), validators=dataclasses.replace(GPU, sm=100))
    (machine.user / "d.json").write_text("{")
    (machine.user / "e.json").mkdir()
    found = {each.path.stem: each for each in configuration_file.search(GPU)}
    assert found["a"].refusal is None and len(found["a"].file.entries) == 1
    assert (
        found["b"].refusal == "device differs: the file says 'Other GPU', here it is 'Example GPU'"
    )
    assert found["c"].refusal == "sm differs: the file says 100, here it is 90"
    assert found["d"].refusal.startswith("this is not JSON") and found["d"].file is None
    assert found["e"].refusal.startswith("this is not a regular file")
    without = configuration_file.search("there is no GPU")
    assert {each.refusal for each in without[:3]} == {"there is no GPU"}


@pytest.mark.parametrize("sm", [80, 90])
def test_wgmma_is_hoppers_alone(sm):
    tuned = entry(
        configuration=tile(instruction="wgmma"), times=dataclasses.replace(TIMES, other=90.0)
    )
    here = dataclasses.replace(GPU, sm=sm)
    if sm == 90:
        assert (
            contents(file(tuned, validators=here))["entries"][0]["configuration"]["instruction"]
            == "wgmma"
        )
    else:
        with pytest.raises(
            ValueError, match=r"entries\[0\].configuration.instruction is 'wgmma', .* sm 90 have"
        ):
            file(tuned, validators=here)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2; this version of lsq reads format 3: tune again"),
        ({"format": True}, "format is True; this"),
        ({"device": ""}, "device is ''; it must be a printable text"),
        ({"device": "a\nb"}, r"device is 'a\\nb'; it must be a printable text"),
        ({"device": "\ud800"}, r"device is '\\ud800'; it must be a printable text"),
        (
            {"device": "x" * 201},
            "device is 'xxx.*\\.\\.\\.; it must be a printable text of 1 to 200",
        ),
        ({"sm": 9}, "sm is 9; it must"),
        ({"multiprocessors": 0}, "multiprocessors is 0; it must"),
        ({"library": None}, "library is None; it must"),
    ],
)
def test_no_such_gpu(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(GPU, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"device": "Other"}, "device differs: the file says 'Other', here it is 'Example GPU'"),
        (
            {"library_version": "2.0"},
            "library_version differs: the file says '2.0', here it is '13.0.2'",
        ),
    ],
)
def test_difference(changes, words):
    assert difference(dataclasses.replace(GPU, **changes), GPU) == words


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no GPU here; install the NVIDIA driver"):
        configuration_file.here()


@pytest.mark.gpu
def test_this_gpu():
    found = configuration_file.here()
    assert found.device == torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    assert found.sm == 10 * major + minor
    assert found.library_version.count(".") == 2


@pytest.mark.parametrize(
    ("name", "file"), [("NVIDIA H200", "NVIDIA_H200"), ("../../é", "unknown"), ("A (x)", "A_x")]
)
def test_file_name(name, file):
    assert configuration_file.file_name(dataclasses.replace(GPU, device=name)) == f"{file}.json"
