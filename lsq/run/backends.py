"""Backends: the reference in plain PyTorch, the CPU, a GPU, and the emulator of one."""

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from lsq.native import loader, tiles
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation, Spec

if TYPE_CHECKING:
    from lsq.run.cuda import CUDA

NAMES = ("reference", "cpu", "cuda", "emulated")


class Reference(Backend):
    """Runs `Operation.reference`: plain PyTorch, slow, and what the others are tested against."""

    name = "reference"
    either_border = True

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        def run() -> None:
            for operation, _ in calls:
                operation.store(operation.reference())

        return run


class CPU(Backend):
    """Runs `Operation.cpu`; operations that are a C++ loop and nothing else run in one foreign call
    together."""

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
    """Return the backend of a device; on the CPU the reference, said once, where there is no C++
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
def _on_gpu(index: int, activations: torch.dtype) -> "CUDA":
    from lsq.run.cuda import CUDA, gpu  # here, since on a CPU nothing of it is needed

    return CUDA(gpu(index), activations=activations)


@functools.cache
def _emulated(activations: torch.dtype) -> "CUDA":
    from lsq.run.cuda import CUDA, emulated_device

    return CUDA(emulated_device(), activations=activations)


@functools.cache
def _on_cpu(name: str) -> Backend:
    return {"reference": Reference, "cpu": CPU}[name]()


def _of_cpu(device: torch.device, activations: torch.dtype | None) -> Backend:
    return _on_cpu("cpu" if loader.available() else "reference")


def _of_gpu(device: torch.device, activations: torch.dtype | None) -> Backend:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_gpu(index, activations or ACTIVATIONS["cuda"][0])


_makers: dict[str, Maker] = {"cpu": _of_cpu, "cuda": _of_gpu}
"""By type of device. A registry, since devices of others are registered (tests have one)."""
