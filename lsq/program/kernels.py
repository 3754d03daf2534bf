"""Which kernels a program needs on a GPU: its operations' launches, found without a GPU and without memory.

A program is written in float32. On a GPU, activations and their gradients have a dtype of half the size; everything
else keeps its own: parameters and their gradients, clips, scales, statistics, codes, masks.
"""

from collections.abc import Iterable, Iterator

import torch

from lsq.csrc.launch import Kernel, Launch, Product
from lsq.program.program import Program
from lsq.program.tensor import Operation, VirtualTensor


def device_dtype(program: Program, tensor: VirtualTensor, activations: torch.dtype) -> torch.dtype:
    """dtype of a tensor of `program` on a GPU, for activations of dtype `activations`."""
    master = {*program.parameters, *(gradient for leaf, gradient in _leaves(program) if leaf in program.parameters)}
    wide = tensor in master or len(tensor.shape) < 2 or tensor.name.endswith((".error", "position_weight"))
    return tensor.dtype if wide or tensor.dtype != torch.float32 else activations


def _leaves(program: Program) -> Iterable[tuple[VirtualTensor, VirtualTensor | None]]:
    return zip(program.differentiable, program.gradients, strict=True)


def entries(program: Program, activations: torch.dtype) -> Iterator[tuple[Operation, list[Launch | Product]]]:
    """Each operation of `program` with its launches, on tensors that have a shape and a dtype but no memory.

    Raises:
        ValueError: an operation has no CUDA implementation, or cannot take these shapes.
    """
    placed: dict[VirtualTensor, torch.Tensor] = {}

    def place(tensor: VirtualTensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if tensor not in placed:
            dtype = device_dtype(program, tensor, activations)
            placed[tensor] = torch.empty(tensor.shape, dtype=dtype, device="meta")
        return placed[tensor]

    for operation in program.operations:
        definition = operation.definition
        if definition.cuda is None:
            raise ValueError(f"operation {definition.name} has no CUDA implementation")
        inputs, outputs = ([place(tensor) for tensor in group] for group in (operation.inputs, operation.outputs))
        wanted = definition.cuda_scratch(*inputs, **operation.attributes) if definition.cuda_scratch else ()
        scratch = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in wanted]
        yield operation, definition.cuda(*inputs, *outputs, *scratch, **operation.attributes)


def kernels(program: Program, activations: torch.dtype) -> set[Kernel]:
    """Every specialised kernel that `program` launches."""
    return {
        entry.kernel
        for _, launched in entries(program, activations)
        for entry in launched
        if isinstance(entry, Launch)
    }
