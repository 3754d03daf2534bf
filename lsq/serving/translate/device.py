"""Where a translator computes, by the names that `lsq generate` has for it."""

import torch

from lsq.config import require_choice
from lsq.run.backends import Backend, backend
from lsq.run.cuda import gpu_fault

DEVICES = {"cpu": "cpu", "cuda": "cuda", "emulator": "emulated"}
"""What it is called -> its backend."""


def place_of(device: str) -> Backend:
    """The backend of a device, one of DEVICES, with activations in float32 everywhere.

    Raises:
        ValueError: there is none of that name, or it does not work here.
    """
    require_choice("device", device, DEVICES)
    fault = gpu_fault() if device == "cuda" else None
    if fault:
        raise ValueError(f"device cuda: {fault}")
    try:
        return backend(DEVICES[device], torch.float32)
    except RuntimeError as error:
        raise ValueError(f"device {device}: {error}") from error
