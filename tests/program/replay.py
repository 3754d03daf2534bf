"""Whole programs as one launch list, and their results on the CPU."""

from dataclasses import dataclass

import torch

from lsq.csrc.device import Device
from lsq.csrc.launch_list import LaunchList
from lsq.program import kernels
from lsq.program.executor import Hooks, run
from lsq.program.frames import FreshFrame
from lsq.program.program import Program
from lsq.program.samples import border_tensors


@dataclass
class Replayed:
    """A program with its tensors on a device, as one list."""

    program: Program
    work: LaunchList
    placed: dict

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients, on the CPU, by name."""
        wanted = (*self.program.outputs, *(g for g in self.program.gradients if g is not None))
        return {tensor.name: self.placed[tensor].cpu() for tensor in wanted}


def replay_of(program: Program, device: Device, activations=torch.float32, seed: int = 0, **options) -> Replayed:
    """Place `program` on `device` with random border tensors; options: of the launch list."""
    placed = kernels.tensors(program, activations, device.place)
    for tensor, value in border_tensors(program, seed).items():
        placed[tensor].copy_(value)
    listed = [entry for _, launched in kernels.entries(program, placed) for entry in launched]
    return Replayed(program, device.list(listed, title=program.name, **options), placed)


def on_the_cpu(program: Program, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same program, op by op, with the CPU's implementations."""
    values = border_tensors(program, seed)
    kept = dict(values)

    def keep(operation, alive):
        kept.update((tensor, alive[tensor]) for tensor in operation.outputs if tensor is not None)

    run(program, 0, len(program.operations), values, Hooks(after=keep), FreshFrame())
    wanted = (*program.outputs, *(g for g in program.gradients if g is not None))
    return {tensor.name: kept[tensor] for tensor in wanted}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`."""
    norm = wanted.double().norm()
    return float((found.double() - wanted.double()).norm() / (norm if norm > 0 else 1.0))
