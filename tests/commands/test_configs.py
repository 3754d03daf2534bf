"""`lsq configs`: what it lists, shows, verifies and exports."""

import dataclasses
import json

import pytest

from lsq.commands import cli, configs
from lsq.gemm import configuration_file
from tests.gemm.tuned import GPU, TIMES, Machine, cublas, cublas_entry, entry, file, tile

ITS_DEVICE = "the device that it was made on"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_list(machine, capsys):
    used = machine.add(machine.user, "a", entry(8), entry(9))
    other = machine.add(machine.user, "b", entry(8), validators=dataclasses.replace(GPU, sm=100))
    damaged = machine.user / "c.json"
    damaged.write_text("{")
    assert cli.main(["configs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{used}: Example GPU, 2 entries; used"
    assert lines[1] == (
        f"{other}: Example GPU, 1 entries; not used: sm differs: the file says 100, here it is 90"
    )
    assert lines[2].startswith(f"{damaged}: damaged: this is not JSON") and len(lines) == 3
    machine.gpu = None
    assert cli.main(["configs", "list"]) == 0
    assert "2 entries; not used: there is no GPU here" in capsys.readouterr().out


def test_list_nothing(machine, capsys):
    assert cli.main(["configs", "list"]) == 0
    assert f"There are no files in {machine.user}." in capsys.readouterr().out


def test_show(machine, capsys):
    path = machine.add(machine.user, "a", entry(8), entry(1024))
    assert cli.main(["configs", "show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "Example GPU: library cublasLt, library_version 13.0.2, sm 90, multiprocessors 132"
    )
    assert lines[1] == "2 entries; times in microseconds"
    heading = "op m n k layout types chosen default float gain spread date run as"
    assert lines[2].split() == heading.split()
    expected = (
        "project 1024 128 256 nt int8 int32 80.0 100.0 250.0 1.25 2.0% 2026-01-31 tiles of"
        " 64 x 64, 5 stages"
    )
    assert lines[4].split() == expected.split() and len(lines) == 5
    assert lines[3].index(" nt ") == lines[4].index(" nt ") == lines[2].index(" layout ")


def test_show_algorithms_and_empty_files():
    shown = configs.show(file(cublas_entry()))
    assert "sm 90, multiprocessors 132" in shown and "cuBLASLt by 0001" in shown
    times = dataclasses.replace(TIMES, other=88.0)
    for way, than in ((tile(), "cuBLASLt and a kernel"), (cublas(), "the best tile")):
        shown = configs.show(file(entry(configuration=way, times=times)))
        assert f"{way}; 1.10 times as fast as {than}" in shown
    assert configs.show(file()).splitlines()[1:] == ["0 entries; times in microseconds"]


def test_mistakes_are_one_line(machine, capsys):
    path = machine.user / "a.json"
    for action in ("show", "verify"):
        assert cli.main(["configs", action, str(path)]) == 2
        error = capsys.readouterr().err
        assert (
            f"error: there is no file {path} of tuned products; `lsq configs list` names" in error
        )
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    assert cli.main(["configs", "show", str(path)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"lsq configs: error: {path}: the content is a list")
        and error.count("\n") == 1
    )
    with pytest.raises(SystemExit):
        cli.main(["configs"])
    assert "ACTION" in capsys.readouterr().err


def test_verify(machine, monkeypatch, capsys):
    path = machine.add(machine.user, "a", cublas_entry(m=8), cublas_entry(m=9))
    faults = {8: None, 9: "its sums are wrong"}
    monkeypatch.setattr(configs, "gpu_trials", lambda cache: None)
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: faults[entry.key.m])
    assert cli.main(["configs", "verify", str(path), "--quiet"]) == 1
    wrong, total = capsys.readouterr().out.splitlines()
    assert wrong == "matmul 9 x 48 x 64 (int8 to int32, nt): its sums are wrong"
    assert total == "2 entries checked; 1 wrong."
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: None)
    assert cli.main(["configs", "verify", str(path), "--quiet"]) == 0
    assert capsys.readouterr().out == "2 entries checked; none wrong.\n"


def test_verify_refuses_files_of_other_devices(machine, capsys):
    path = machine.add(machine.user, "b", cublas_entry())
    machine.gpu = dataclasses.replace(GPU, device="Other GPU")
    assert cli.main(["configs", "verify", str(path)]) == 2
    assert "device differs: the file says 'Example GPU', here it is" in capsys.readouterr().err
    machine.gpu = None
    assert cli.main(["configs", "verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert error == f"lsq configs: error: {path}: there is no GPU here; verify it on {ITS_DEVICE}\n"


def test_export(machine, tmp_path, capsys):
    machine.add(machine.user, "a", entry(8))
    machine.add(
        machine.user, "b", entry(8, times=dataclasses.replace(entry().times, chosen=1)), entry(9)
    )
    assert cli.main(["configs", "export", str(tmp_path / "mine.json")]) == 0
    assert configuration_file.read(tmp_path / "mine.json") == file(entry(8), entry(9))
    assert capsys.readouterr().out == f"2 entries for Example GPU: {tmp_path / 'mine.json'}\n"
    assert cli.main(["configs", "export", str(tmp_path)]) == 0
    validators = json.loads((tmp_path / "Example_GPU.json").read_text())["validators"]
    assert validators["kind"] == "cuda" and validators["sm"] == 90


def test_nothing_to_export(machine, tmp_path, capsys):
    path = str(tmp_path / "mine.json")
    assert cli.main(["configs", "export", path]) == 2
    assert "no file holds for the GPU here, so there is nothing" in capsys.readouterr().err
    machine.gpu = None
    assert cli.main(["configs", "export", path]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "mine.json").exists()
