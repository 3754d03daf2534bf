"""Where files are found, which are refused and why, and what this device is."""

import dataclasses
import re

import pytest
import torch

from lsq.csrc import processor
from lsq.gemm import search
from tests.gemm.tuned import CPU, GPU, Machine, cublas_entry, entry

OTHER = dataclasses.replace(CPU, device="Other CPU")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_the_user_goes_before_the_package(machine):
    assert search.paths() == []
    packaged = machine.add(machine.package, "a")
    second, first = machine.add(machine.user, "b"), machine.add(machine.user, "a")
    (machine.user / "a.json.tmp").write_text("")
    (machine.user / "notes.txt").write_text("")
    assert search.paths() == [("user", first), ("user", second), ("package", packaged)]


def test_user_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert search.user_folder() == tmp_path / "lsq" / "gemm"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert search.user_folder() == tmp_path / ".config" / "lsq" / "gemm"


def test_no_home(monkeypatch):
    def nobody():
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(search.Path, "home", nobody)
    assert search.user_folder() is None
    assert all(source == "package" for source, _ in search.paths())


def test_every_file_is_judged(machine):
    machine.add(machine.user, "a", entry())
    machine.add(machine.user, "b", entry(), validators=OTHER)
    machine.add(machine.user, "c", cublas_entry(), validators=GPU)
    machine.add(machine.user, "d", entry(), validators=dataclasses.replace(CPU, threads=64))
    (machine.user / "e.json").write_text("{")
    (machine.user / "f.json").mkdir()
    found = {each.path.stem: each for each in search.find(CPU)}
    assert found["a"].refusal is None and len(found["a"].file.entries) == 1
    assert found["b"].refusal == "device differs: the file says 'Other CPU', here it is 'Example CPU'"
    assert found["c"].refusal.startswith("kind differs")
    assert found["d"].refusal == "threads differs: the file says 64, here it is 2"
    assert found["e"].refusal.startswith("this is not JSON") and found["e"].file is None
    assert found["f"].refusal.startswith("this is not a regular file")
    assert [each.foreign for each in found.values()] == [False, True, True, False, False, False]


def test_explicit_files_must_hold(machine):
    good, bad = machine.add(machine.user, "a", entry()), machine.add(machine.user, "b", validators=OTHER)
    (found,) = search.find(CPU, [good])
    assert (found.path, found.source, found.refusal) == (good, "explicit", None)
    with pytest.raises(ValueError, match=rf"^{bad}: device differs: the file says 'Other CPU', here .*; tune here"):
        search.find(CPU, [good, bad])
    with pytest.raises(FileNotFoundError):
        search.find(CPU, [machine.user / "none.json"])
    good.write_text("")
    with pytest.raises(ValueError, match="this is not JSON"):
        search.find(CPU, [good])


def test_this_cpu():
    found = search.here()
    assert found.device == processor.cpu_model()[:200]
    assert set(found.features) == processor.cpu_features() & set(processor.CPU_FEATURES)
    assert found.threads == torch.get_num_threads()
    assert re.fullmatch(r"\d+\.\d+[\w.]*|none", found.library_version)
    assert search.here("cpu") == found


def test_odd_names_can_be_written(monkeypatch):
    for name, expected in [("A\tCPU\x00 ", "ACPU"), ("", "unknown"), ("x" * 300, "x" * 200)]:
        monkeypatch.setattr(processor, "cpu_model", lambda name=name: name)
        assert search.here().device == expected


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no GPU here; install the NVIDIA driver"):
        search.here("cuda")
    with pytest.raises(ValueError, match="kind is 'tpu'; allowed"):
        search.here("tpu")


@pytest.mark.gpu
def test_this_gpu():
    found = search.here("cuda")
    assert found.device == torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    assert found.sm == 10 * major + minor
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.library_version)


def test_version_text():
    assert search.version_text(130002) == "13.0.2"
    assert search.version_text(121311) == "12.13.11"


def test_onednn_version(monkeypatch):
    search.onednn_version.cache_clear()
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with:\n  - GCC 13.3\n")
    assert search.onednn_version() == "none"
    search.onednn_version.cache_clear()
    monkeypatch.setattr(torch.__config__, "show", lambda: "  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d26)\n")
    assert search.onednn_version() == "3.7.1"
    search.onednn_version.cache_clear()


def test_file_name():
    assert search.file_name(GPU) == "Example_GPU.json"
    assert search.file_name(dataclasses.replace(GPU, device="NVIDIA H200")) == "NVIDIA_H200.json"
    assert search.file_name(dataclasses.replace(CPU, device="AMD EPYC 9B14 (x)")) == "AMD_EPYC_9B14_x_2_threads.json"
    assert search.file_name(dataclasses.replace(CPU, device="../../é")) == "unknown_2_threads.json"
