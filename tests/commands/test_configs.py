"""`lsq configs`: what it lists, shows and verifies."""

import dataclasses

import pytest

from lsq.commands import configs
from tests.gemm.tuned import GPU, TIMES, Machine, cublas, cublas_entry, entry, file, tile


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def listed(lsq) -> list[str]:
    status, printed, _ = lsq("configs", "list")
    assert status == 0
    return printed.splitlines()


def test_list(machine, lsq):
    (nothing,) = listed(lsq)
    assert nothing.startswith(f"There are no files in {machine.user}.")
    used = machine.add(machine.user, "a", entry(8), entry(9))
    other = machine.add(machine.user, "b", entry(8), validators=dataclasses.replace(GPU, sm=100))
    damaged = machine.user / "c.json"
    damaged.write_text("{")
    lines = listed(lsq)
    assert lines[0] == f"{used}: Example GPU, 2 entries; used"
    differs = "not used: sm differs: the file says 100, here it is 90"
    assert lines[1] == f"{other}: Example GPU, 1 entries; {differs}"
    assert lines[2].startswith(f"{damaged}: damaged: this is not JSON") and len(lines) == 3
    machine.gpu = None
    assert listed(lsq)[0].endswith("2 entries; not used: there is no GPU here")


def test_show(machine, lsq):
    path = machine.add(machine.user, "a", entry(8), entry(1024))
    status, printed, _ = lsq("configs", "show", path)
    lines = printed.splitlines()
    library = "library cublasLt, library_version 13.0.2"
    assert lines[0] == f"Example GPU: {library}, sm 90, multiprocessors 132" and status == 0
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


def test_mistakes_are_one_line(machine, refused):
    path = machine.user / "a.json"
    for action in ("show", "verify"):
        message = f"there is no file {path} of tuned products; `lsq configs list` names"
        refused(message, "configs", action, path)
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    refused(f"{path}: the content is a list", "configs", "show", path)
    refused("ACTION", "configs")


def test_verify(machine, monkeypatch, lsq, refused):
    path = machine.add(machine.user, "a", cublas_entry(m=8), cublas_entry(m=9))
    monkeypatch.setattr(configs, "gpu_trials", lambda cache: None)
    faults = {8: None, 9: "its sums are wrong"}
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: faults[entry.key.m])
    status, printed, _ = lsq("configs", "verify", path, "--quiet")
    wrong = "matmul 9 x 48 x 64 (int8 to int32, nt): its sums are wrong"
    assert (status, printed.splitlines()) == (1, [wrong, "2 entries checked; 1 wrong."])
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: None)
    status, printed, _ = lsq("configs", "verify", path, "--quiet")
    assert (status, printed) == (0, "2 entries checked; none wrong.\n")
    machine.gpu = dataclasses.replace(GPU, device="Other GPU")
    refused("device differs: the file says 'Example GPU', here it is", "configs", "verify", path)
    machine.gpu = None
    message = f"{path}: there is no GPU here; verify it on the device that it was made on\n"
    refused(message, "configs", "verify", path)
