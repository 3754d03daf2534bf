"""Builds the stub driver and makes a device of it."""

import ctypes
import subprocess
from pathlib import Path

import torch

from lsq.native.device import Device
from lsq.native.runtime import Driver

SOURCE = Path(__file__).parent / "stub_driver.cpp"


def stub_device(folder: Path) -> tuple[Device, ctypes.CDLL]:
    """A device whose launches do nothing, and the stub itself."""
    path = folder / "libstub_cuda.so"
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(path)], check=True)
    stub = ctypes.CDLL(str(path))
    stub.stub_launches.restype = ctypes.c_long
    device = Device(
        name="stub",
        driver=Driver(str(path)),
        compile=lambda kernel: b"code",
        products=None,
        torch_device=torch.device("cpu"),
    )
    return device, stub
