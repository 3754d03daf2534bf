"""`lsq configs`: what it lists, shows, verifies and exports."""

import dataclasses
import json

import pytest

from lsq.commands import configs
from lsq.gemm import configuration_file
from tests.gemm.tuned import CPU, GPU, TIMES, Machine, cublas, cublas_entry, entry, file, tile


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
    other = machine.add(machine.user, "b", entry(8), validators=dataclasses.replace(CPU, threads=9))
    gpu = machine.add(machine.user, "c", cublas_entry(), validators=GPU)
    damaged = machine.user / "d.json"
    damaged.write_text("{")
    lines = listed(lsq)
    assert lines[0] == f"{used}: Example CPU, 2 entries; used"
    differs = "not used: threads differs: the file says 9"
    assert lines[1].startswith(f"{other}: Example CPU, 1 entries; {differs}")
    assert lines[2] == f"{gpu}: Example GPU, 1 entries; not used: there is no cuda here"
    assert lines[3].startswith(f"{damaged}: damaged: this is not JSON") and len(lines) == 4


def test_list_on_a_gpu(machine, lsq):
    machine.here["cuda"] = dataclasses.replace(GPU, sm=100)
    machine.add(machine.user, "a", cublas_entry(), validators=GPU)
    assert "not used: sm differs: the file says 90, here it is 100" in listed(lsq)[0]


def test_show(machine, lsq):
    path = machine.add(machine.user, "a", entry(8), entry(1024))
    status, printed, _ = lsq("configs", "show", path)
    lines = printed.splitlines()
    library = "library onednn, library_version 3.7.1"
    assert lines[0] == f"Example CPU: {library}, features avx2 avx512f, threads 2" and status == 0
    assert lines[1] == "2 entries; times in microseconds"
    heading = "op m n k layout types chosen default float gain spread date run as"
    assert lines[2].split() == heading.split()
    expected = (
        "project 1024 128 256 nt int8 int32 80.0 100.0 250.0 1.25 2.0% 2026-01-31 plain, 96 rows"
        " at a time"
    )
    assert lines[4].split() == expected.split() and len(lines) == 5
    assert lines[3].index(" nt ") == lines[4].index(" nt ") == lines[2].index(" layout ")


def test_show_files_of_gpus_and_empty_ones(machine):
    shown = configs.show(file(cublas_entry(), validators=GPU))
    assert "sm 90, multiprocessors 132" in shown and "id 66, tile 20" in shown
    times = dataclasses.replace(TIMES, other=88.0)
    for way, than in ((tile(), "cuBLASLt and a kernel"), (cublas(), "the best tile")):
        shown = configs.show(file(entry(configuration=way, times=times), validators=GPU))
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


def test_verify(machine, monkeypatch, lsq):
    machine.here["cuda"] = GPU
    path = machine.add(machine.user, "a", cublas_entry(m=8), cublas_entry(m=9), validators=GPU)
    monkeypatch.setattr(configs, "gpu_trials", lambda cache: None)
    faults = {8: None, 9: "its sums are wrong"}
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: faults[entry.key.m])
    status, printed, _ = lsq("configs", "verify", path, "--quiet")
    wrong = "matmul 9 x 48 x 64 (int8 to int32, nt): its sums are wrong"
    assert (status, printed.splitlines()) == (1, [wrong, "2 entries checked; 1 wrong."])
    monkeypatch.setattr(configs, "entry_fault", lambda entry, trials: None)
    status, printed, _ = lsq("configs", "verify", path, "--quiet")
    assert (status, printed) == (0, "2 entries checked; none wrong.\n")


def test_verify_refuses_files_of_other_devices_and_of_cpus(machine, refused):
    gpu = machine.add(machine.user, "b", cublas_entry(), validators=GPU)
    message = f"{gpu}: there is no cuda here; verify it on the device that it was made on\n"
    refused(message, "configs", "verify", gpu)
    machine.here["cuda"] = dataclasses.replace(GPU, device="Other GPU")
    message = "device differs: the file says 'Example GPU', here it is"
    refused(message, "configs", "verify", gpu)
    cpu = machine.add(machine.user, "a", entry(8))
    message = "is for a CPU, whose tiles are exact whatever a file says"
    refused(message, "configs", "verify", cpu)


def test_export(machine, tmp_path, lsq):
    machine.add(machine.user, "a", entry(8))
    faster = dataclasses.replace(entry().times, chosen=1)
    machine.add(machine.user, "b", entry(8, times=faster), entry(9))
    export = ("configs", "export", "--kind", "cpu")
    said = f"2 entries for Example CPU: {tmp_path / 'mine.json'}\n"
    assert lsq(*export, tmp_path / "mine.json") == (0, said, "")
    assert configuration_file.read(tmp_path / "mine.json") == file(entry(8), entry(9))
    assert lsq(*export, tmp_path)[0] == 0
    made = json.loads((tmp_path / "Example_CPU_2_threads.json").read_text())
    assert made["validators"]["threads"] == 2


def test_export_of_a_gpu(machine, tmp_path, lsq):
    machine.here["cuda"] = GPU
    machine.add(machine.user, "a", cublas_entry(), validators=GPU)
    assert lsq("configs", "export", tmp_path)[0] == 0
    assert configuration_file.read(tmp_path / "Example_GPU.json").entries == (cublas_entry(),)


def test_nothing_to_export(machine, tmp_path, refused):
    export = ("configs", "export", tmp_path / "mine.json")
    refused("--kind is cuda, and there is no cuda here", *export)
    message = "no file holds for the cpu here, so there is nothing to export; make one"
    refused(message, *export, "--kind", "cpu")
    assert not (tmp_path / "mine.json").exists()
