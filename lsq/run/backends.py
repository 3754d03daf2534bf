"""Backends: the reference in plain PyTorch, the CPU, a GPU and the emulator of a GPU."""

import functools
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from lsq.native import loader, tiles
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation, Spec

ACTIVATIONS = {
    "reference": (torch.float32,),
    "cpu": (torch.float32,),
    "cuda": (torch.bfloat16, torch.float32),
    "emulated": (torch.float32, torch.bfloat16),
}
"""Backend name -> the dtypes that activations may have there, the default first."""


class Reference(Backend):
    """Runs `Operation.reference`: plain PyTorch, slow. Tests compare the other backends with it."""

    name = "reference"
    either_border = True

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        def run() -> None:
            for operation, _ in calls:
                operation.store(operation.reference())

        return run


class CPU(Backend):
    """Runs `Operation.cpu`. One foreign call runs neighbouring operations that are C++ loops
    alone."""

    name = "cpu"
    refillable = True
    packs_weights = True
    either_border = True

    @property
    def multiplies_groups(self) -> bool:
        return tiles.vectorised()

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cpu_scratch()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        steps: list[Callable[[], None]] = []
        for is_loop, group in groupby(calls, lambda call: type(call[0]).cpu is Operation.cpu):
            if is_loop:
                steps.append(loader.sequence([operation for operation, _ in group]))
            else:
                steps += [
                    functools.partial(operation.cpu, *scratch) for operation, scratch in group
                ]
        if len(steps) == 1:
            return steps[0]

        def run() -> None:
            for step in steps:
                step()

        return run


class Meta(CPU):
    """Computes nothing: programs run on the meta device, where tensors have shapes alone."""

    name = "meta"
    device = torch.device("meta")

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        return lambda: None

    def run(self, operation: Operation) -> None:
        _ = [self.allocate(*wanted) for wanted in self.scratch(operation)]

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in tensors]


def backend(name: str, activations: torch.dtype | None = None) -> Backend:
    """Return the backend of this name, the same object for the same arguments.

    Args:
        name: "reference", "cpu", "cuda" or "emulated".
        activations: dtype of activations in programs; None: bfloat16 on "cuda", float32 elsewhere.

    Raises:
        ValueError: there is no such backend, or it does not have these activations.
        RuntimeError: there is no GPU, or no C++ compiler.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}")
    allowed = ACTIVATIONS[name]
    activations = activations or allowed[0]
    if activations not in allowed:
        raise ValueError(
            f"activations are {activations}; the backend {name!r} has them in"
            f" {' or '.join(map(str, allowed))}"
        )
    return _on_gpu(name, 0, activations) if name in ("cuda", "emulated") else _on_cpu(name)


def for_device(device: torch.device, activations: torch.dtype | None = None) -> Backend:
    """Return the backend of a device. On the CPU this is the reference, with one warning, if there
    is no C++ library. `activations`: their dtype on a GPU; None: bfloat16. Raises ValueError: lsq
    does not run on this device."""
    if device.type not in MAKERS:
        raise ValueError(
            f"nothing of lsq runs on {device}; move the tensors to one of: {', '.join(MAKERS)}"
        )
    return MAKERS[device.type](device, activations)


def run(operation: Operation) -> None:
    """Run an operation on the device of its tensors; on a GPU on PyTorch's current stream. Raises
    ValueError: the tensors lie on different devices, or do not fit the operation."""
    for_device(operation.outputs[0].device).run(operation)


@functools.cache
def _on_cpu(name: str) -> Backend:
    return {"cpu": CPU, "meta": Meta, "reference": Reference}[name]()


@functools.cache
def _on_gpu(name: str, index: int, activations: torch.dtype) -> Backend:
    from lsq.run.cuda import CUDA, emulated_device, gpu  # a CPU needs none of it

    device = gpu(index) if name == "cuda" else emulated_device()
    return CUDA(device, activations=activations)


def _of_cpu(device: torch.device, activations: torch.dtype | None) -> Backend:
    return _on_cpu("cpu" if loader.available() else "reference")


def _of_gpu(device: torch.device, activations: torch.dtype | None) -> Backend:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_gpu("cuda", index, activations or ACTIVATIONS["cuda"][0])


MAKERS: dict[str, Callable[[torch.device, torch.dtype | None], Backend]] = {
    "cpu": _of_cpu,
    "cuda": _of_gpu,
    "meta": lambda device, activations: _on_cpu("meta"),
}
"""Device type -> makes its backend from (device, dtype of activations or None for the default)."""
