"""Where operations run: the reference in plain PyTorch, the CPU, a GPU, and the emulator of one."""

import functools
from collections.abc import Callable

import torch

from lsq.native import loader
from lsq.program.backend import Backend
from lsq.program.operation import Operation
from lsq.run.cpu import CPU
from lsq.run.cuda import CUDA, emulated_device, gpu
from lsq.run.reference import Reference
from lsq.run.requirements import gpu_fault

NAMES = ("reference", "cpu", "cuda", "emulated")

__all__ = [
    "ACTIVATIONS",
    "NAMES",
    "Backend",
    "backend",
    "for_device",
    "gpu_fault",
    "register",
    "run",
]


ACTIVATIONS = {
    "reference": (torch.float32,),
    "cpu": (torch.float32,),
    "cuda": (torch.bfloat16, torch.float32),
    "emulated": (torch.float32, torch.bfloat16),
}
"""The dtypes that activations may have on each backend, the usual one first."""


def backend(name: str, activations: torch.dtype | None = None) -> Backend:
    """The backend of that name, one for all.

    Args:
        name: one of NAMES.
        activations: their dtype in programs; None: bfloat16 on "cuda", float32 elsewhere.

    Raises:
        ValueError: there is no backend of that name, or it has no such activations.
        RuntimeError: there is no GPU ("cuda"), or no C++ compiler ("emulated").
    """
    if name not in NAMES:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(map(repr, NAMES))}")
    allowed = ACTIVATIONS[name]
    activations = activations or allowed[0]
    if activations not in allowed:
        raise ValueError(
            f"activations are {activations}; the backend {name!r} has them in"
            f" {' or '.join(map(str, allowed))}"
        )
    if name == "cuda":
        return _on_gpu(0, activations)
    return _emulated(activations) if name == "emulated" else _on_cpu(name)


Maker = Callable[[torch.device, torch.dtype | None], Backend]
"""(device, dtype of activations; None: the usual one) -> what runs there."""


def register(device_type: str, make: Maker) -> Maker | None:
    """Say what runs on tensors of a type of device, which lsq need not know; `make` returns the
    same one each time.

    Returns:
        what was said before.
    """
    before, _makers[device_type] = _makers.get(device_type), make
    return before


def for_device(device: torch.device, activations: torch.dtype | None = None) -> Backend:
    """What runs on tensors of `device`; on the CPU the reference, said once, where there is no C++
    library.

    Args:
        device: where the tensors lie.
        activations: their dtype in programs on a GPU; None: the usual one.

    Raises:
        ValueError: nothing runs on devices of that type.
    """
    if device.type not in _makers:
        raise ValueError(
            f"nothing of lsq runs on {device}; move the tensors to one of: {', '.join(_makers)}"
        )
    return _makers[device.type](device, activations)


def run(operation: Operation) -> None:
    """Run one operation now, where its tensors lie; on a GPU on PyTorch's current stream.

    Raises:
        ValueError: a tensor lies elsewhere than the others, or is not what the operation takes
            there.
    """
    for_device(operation.outputs[0].device).run(operation)


@functools.cache
def _on_gpu(index: int, activations: torch.dtype) -> CUDA:
    return CUDA(gpu(index), activations=activations)


@functools.cache
def _emulated(activations: torch.dtype) -> CUDA:
    return CUDA(emulated_device(), activations=activations)


@functools.cache
def _on_cpu(name: str) -> Backend:
    return {"reference": Reference, "cpu": CPU}[name]()


def _of_gpu(device: torch.device, activations: torch.dtype | None) -> Backend:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_gpu(index, activations or ACTIVATIONS["cuda"][0])


_makers: dict[str, Maker] = {
    "cpu": lambda device, activations: backend("cpu" if loader.available() else "reference"),
    "cuda": _of_gpu,
}
"""By type of device."""
