"""Runs whole programs on the backend for the CPU, without an executor: every tensor has memory of
its own."""

import torch

from lsq.config import QuantConfig
from lsq.program.builder import Builder
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.backends import backend


def builder(name: str, **options) -> Builder:
    """A builder of training programs whose tensors have one reader each."""
    return Builder(
        name, QuantConfig(**options), training=True, backward=True, backend=backend("cpu")
    )


def run(
    program: Program, given: dict[VirtualTensor, torch.Tensor]
) -> dict[VirtualTensor, torch.Tensor]:
    """Both passes from real inputs, parameters and gradients of outputs; every tensor that was
    there."""
    memory = dict(given)

    def real(tensor):
        if isinstance(tensor, VirtualTensor) and tensor not in memory:
            memory[tensor] = torch.full(tensor.shape, 85, dtype=tensor.dtype)
        return memory.get(tensor, tensor)

    calls = [
        (operation.bind(real), [real(tensor) for tensor in scratch])
        for operation, scratch in zip(program.operations, program.scratch, strict=True)
    ]
    backend("cpu").prepare(calls)()
    return memory
