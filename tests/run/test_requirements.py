"""Why a GPU cannot be used, said without touching it."""

import pytest
import torch

from lsq.native import compiler
from lsq.run import cuda as requirements
from lsq.run.cuda import gpu_fault


@pytest.fixture
def capability(monkeypatch):
    """capability(major, minor): PyTorch sees one such GPU, with a driver that supports CUDA 13.0,
    and libraries."""

    class Driver:
        version = (13, 0)

        def __init__(self, path, ordinal):
            assert (path, ordinal) == ("libcuda.so.1", 0)

    def capability(*found: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found)
        monkeypatch.setattr(requirements, "Driver", Driver)
        monkeypatch.setattr(requirements, "find_cublaslt", lambda: "libcublasLt.so")
        monkeypatch.setattr(requirements, "ProductLibrary", lambda path: None)
        monkeypatch.setattr(compiler, "version", lambda: "13.0")

    return capability


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_fault().startswith("there is no GPU 0 that PyTorch can use (it sees 0)")


def test_a_gpu_with_everything(capability):
    capability(8, 0)
    assert gpu_fault() is None
    assert "no GPU 1" in gpu_fault(1)


def test_an_old_gpu(capability):
    capability(7, 5)
    assert "compute capability 7.5; lsq's CUDA kernels need 8.0" in gpu_fault()


def test_an_old_driver(capability, monkeypatch):
    capability(9, 0)
    monkeypatch.setattr(compiler, "version", lambda: "14.1")
    assert "supports CUDA 13.0, but kernels are compiled by NVRTC 14.1" in gpu_fault()


def missing(*arguments):
    raise RuntimeError(
        "no libcublasLt was found: install CUDA's libraries with `pip install '.[cuda13]'`"
    )


@pytest.mark.parametrize("library", ["find_cublaslt", "ProductLibrary"])
def test_missing_products(capability, monkeypatch, library):
    capability(9, 0)
    monkeypatch.setattr(requirements, library, missing)
    assert "pip install '.[cuda13]'" in gpu_fault()


def test_no_compiler(capability, monkeypatch):
    capability(9, 0)
    monkeypatch.setattr(compiler, "version", missing)
    assert gpu_fault() is not None
