"""Validators: what they refuse, the words for what differs, and what this device is."""

import dataclasses
import re

import pytest
import torch
from lsq.gemm.device import difference

from lsq.gemm import device
from lsq.native import processor
from tests.gemm.tuned import CPU, GPU


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format is 1; this version of lsq reads format 2: tune again"),
        ({"format": True}, "format is True; this"),
        ({"device": ""}, "device is ''; it must be a printable text"),
        ({"device": "a\nb"}, r"device is 'a\\nb'; it must be a printable text"),
        ({"device": "\ud800"}, r"device is '\\ud800'; it must be a printable text"),
        (
            {"device": "x" * 201},
            "device is 'xxx.*\\.\\.\\.; it must be a printable text of 1 to 200",
        ),
        ({"threads": 0}, "threads is 0; it must be a whole number from 1"),
        ({"features": ["avx2"]}, "features is a list; it must"),
        ({"features": ("b", "a")}, "features is a tuple; the names must be sorted"),
        ({"features": ("a", "a")}, "features is a tuple; the names must be sorted"),
        ({"features": (1,)}, r"features\[0\] is 1; it must be a printable text"),
        (
            {"features": tuple(map(str, range(101)))},
            "features is a tuple; it must be a list of at most 100",
        ),
    ],
)
def test_no_such_cpu(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(CPU, **changes)


@pytest.mark.parametrize("changes", [{"sm": 9}, {"multiprocessors": 0}, {"library": None}])
def test_no_such_gpu(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} is "):
        dataclasses.replace(GPU, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"device": "Other"}, "device differs: the file says 'Other', here it is 'Example CPU'"),
        ({"threads": 4}, "threads differs: the file says 4, here it is 2"),
        (
            {"library_version": "2.0"},
            "library_version differs: the file says '2.0', here it is '3.7.1'",
        ),
        (
            {"features": ("amx", "avx2")},
            "features differ: the file alone has amx, this CPU alone has avx512f",
        ),
        (
            {"features": ("avx2",)},
            "features differ: the file alone has none, this CPU alone has avx512f",
        ),
    ],
)
def test_difference(changes, words):
    assert difference(dataclasses.replace(CPU, **changes), CPU) == words


def test_difference_of_kinds():
    assert (
        difference(GPU, CPU)
        == "kind differs: the file is for the GPU 'Example GPU', here is the CPU 'Example CPU'"
    )
    assert (
        difference(dataclasses.replace(GPU, sm=100), GPU)
        == "sm differs: the file says 100, here it is 90"
    )


def test_this_cpu():
    found = device.here()
    assert found.device == processor.cpu_model()[:200]
    assert set(found.features) == processor.cpu_features() & set(processor.CPU_FEATURES)
    assert found.threads == torch.get_num_threads()
    assert re.fullmatch(r"\d+\.\d+[\w.]*|none", found.library_version)
    assert device.here("cpu") == found


def test_odd_names_can_be_written(monkeypatch):
    for name, expected in [("A\tCPU\x00 ", "ACPU"), ("", "unknown"), ("x" * 300, "x" * 200)]:
        monkeypatch.setattr(processor, "cpu_model", lambda name=name: name)
        assert device.here().device == expected


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no GPU here; install the NVIDIA driver"):
        device.here("cuda")
    with pytest.raises(ValueError, match="kind is 'tpu'; allowed"):
        device.here("tpu")


@pytest.mark.gpu
def test_this_gpu():
    found = device.here("cuda")
    assert found.device == torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    assert found.sm == 10 * major + minor
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.library_version)


def test_onednn_version(monkeypatch):
    device.onednn_version.cache_clear()
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with:\n  - GCC 13.3\n")
    assert device.onednn_version() == "none"
    device.onednn_version.cache_clear()
    monkeypatch.setattr(
        torch.__config__, "show", lambda: "  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d26)\n"
    )
    assert device.onednn_version() == "3.7.1"
    device.onednn_version.cache_clear()


def test_file_name():
    assert device.file_name(GPU) == "Example_GPU.json"
    assert device.file_name(dataclasses.replace(GPU, device="NVIDIA H200")) == "NVIDIA_H200.json"
    assert (
        device.file_name(dataclasses.replace(CPU, device="AMD EPYC 9B14 (x)"))
        == "AMD_EPYC_9B14_x_2_threads.json"
    )
    assert device.file_name(dataclasses.replace(CPU, device="../../é")) == "unknown_2_threads.json"
