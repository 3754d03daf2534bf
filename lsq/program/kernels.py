"""A program on a GPU: the tensors that it takes there, and the launches of its operations on them.

A program is written in float32. On a GPU, activations and their gradients may have a dtype of half the size; everything
else keeps its own: parameters and their gradients, clips, scales, statistics, codes, masks.
"""

from collections.abc import Iterator, Mapping

import torch

from lsq.csrc.launch import Kernel, Launch, Product
from lsq.program.program import Program
from lsq.program.tensor import Operation, VirtualTensor


def device_dtype(program: Program, tensor: VirtualTensor, activations: torch.dtype) -> torch.dtype:
    """dtype of a tensor of `program` on a GPU, for activations of dtype `activations`."""
    leaves = zip(program.differentiable, program.gradients, strict=True)
    master = {*program.parameters, *(gradient for leaf, gradient in leaves if leaf in program.parameters)}
    wide = tensor in master or len(tensor.shape) < 2 or tensor.name.endswith((".error", "position_weight"))
    return tensor.dtype if wide or tensor.dtype != torch.float32 else activations


def tensors(
    program: Program, activations: torch.dtype, place: torch.device | str = "meta"
) -> dict[VirtualTensor, torch.Tensor]:
    """Fresh tensors for everything in `program`, scratch of the CPU left out; on "meta" they take no memory."""
    wanted = dict.fromkeys((*program.inputs, *program.parameters, *program.output_gradients))
    for operation in program.operations:
        wanted.update(dict.fromkeys((*operation.inputs, *operation.outputs)))
    return {
        tensor: torch.empty(tensor.shape, dtype=device_dtype(program, tensor, activations), device=place)
        for tensor in wanted
        if tensor is not None
    }


def entries(
    program: Program, placed: Mapping[VirtualTensor, torch.Tensor], start: int = 0, stop: int | None = None
) -> Iterator[tuple[Operation, list[Launch | Product]]]:
    """Operations `start` to `stop` - 1 of `program`, each with its launches on `placed` tensors and fresh scratch.

    Raises:
        ValueError: an operation has no CUDA implementation, or cannot take these shapes.
    """
    for operation in program.operations[start:stop]:
        definition = operation.definition
        if definition.cuda is None:
            raise ValueError(f"operation {definition.name} has no CUDA implementation")
        inputs, outputs = (
            [None if tensor is None else placed[tensor] for tensor in group]
            for group in (operation.inputs, operation.outputs)
        )
        place = next(tensor for tensor in outputs if tensor is not None).device
        wanted = definition.cuda_scratch(*inputs, **operation.attributes) if definition.cuda_scratch else ()
        scratch = [torch.empty(shape, dtype=dtype, device=place) for shape, dtype in wanted]
        yield operation, definition.cuda(*inputs, *outputs, *scratch, **operation.attributes)


def kernels(program: Program, activations: torch.dtype) -> set[Kernel]:
    """Every specialised kernel that `program` launches, found without a GPU and without memory."""
    listed = entries(program, tensors(program, activations))
    return {entry.kernel for _, launched in listed for entry in launched if isinstance(entry, Launch)}
