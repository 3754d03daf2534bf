"""Where operations run: the reference in plain PyTorch, the CPU, a GPU, and the emulator of one."""

import functools

import torch

from lsq.backends.cpu import CPU
from lsq.backends.cuda import CUDA, emulated_device, gpu
from lsq.backends.reference import Reference
from lsq.csrc import loader
from lsq.program.backend import Backend
from lsq.program.operation import Operation

NAMES = ("reference", "cpu", "cuda", "emulated")

__all__ = ["NAMES", "Backend", "backend", "for_device", "run"]


@functools.cache
def backend(name: str) -> Backend:
    """The backend of that name, one for all.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: there is no GPU ("cuda"), or no C++ compiler ("emulated").
    """
    made = {
        "reference": Reference, "cpu": CPU, "cuda": lambda: _on_gpu(0), "emulated": lambda: CUDA(emulated_device())
    }  # fmt: skip
    if name not in made:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(map(repr, NAMES))}")
    return made[name]()


def for_device(device: torch.device) -> Backend:
    """What runs on tensors of `device`; on the CPU the reference, said once, where there is no C++ library."""
    if device.type == "cuda":
        return _on_gpu(torch.cuda.current_device() if device.index is None else device.index)
    return backend("cpu" if loader.available() else "reference")


def run(operation: Operation) -> None:
    """Run one operation now, where its tensors lie; on a GPU on PyTorch's current stream.

    Raises:
        ValueError: a tensor lies elsewhere than the others, or is not what the operation takes there.
    """
    for_device(operation.outputs[0].device).run(operation)


@functools.cache
def _on_gpu(index: int) -> CUDA:
    return CUDA(gpu(index))
