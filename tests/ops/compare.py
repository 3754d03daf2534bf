"""Runs a program operation by operation, comparing each CPU implementation with its reference on the same inputs."""

import torch

from lsq.program.executor import allocate
from lsq.program.program import Program

TOLERANCE = 2e-5
"""Largest difference of float outputs, relative to the largest magnitude of the reference."""


def random_tensor(virtual, generator):
    """A plausible tensor for an input or parameter, by its name and dtype."""
    if virtual.name == "random_key":
        return torch.tensor([-(2**62) + 12345], dtype=torch.int64)
    if virtual.dtype == torch.bool:
        mask = torch.rand(virtual.shape, generator=generator) < 0.3
        mask[:, 0] = False
        return mask
    if virtual.dtype == torch.int64:
        return torch.randint(0, 5, virtual.shape, generator=generator)
    if virtual.dtype == torch.int8:
        return torch.randint(-127, 128, virtual.shape, generator=generator, dtype=torch.int8)
    if virtual.name.endswith("weight_clip"):
        return 0.15 + 0.1 * torch.rand(virtual.shape, generator=generator)
    if virtual.name.endswith("_clip"):
        return torch.full(virtual.shape, 1.5)
    if virtual.name.endswith(".scale"):
        return 0.01 * torch.rand(virtual.shape, generator=generator)
    scale = 0.2 if virtual.role == "parameter" else 1.0
    return scale * torch.randn(virtual.shape, generator=generator)


def compare_program(program: Program, seed: int = 0) -> set[str]:
    """Compare every operation of `program`; returns the names of those that ran.

    Codes may differ by 1 where float sums before the rounding differ in their last bits; that is counted
    and must stay below one in a thousand.
    """
    generator = torch.Generator().manual_seed(seed)
    borders = (*program.inputs, *program.parameters, *program.output_gradients)
    values = {virtual: random_tensor(virtual, generator) for virtual in borders}
    for operation in program.operations:
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        outputs = [None if tensor is None else allocate(tensor) for tensor in operation.outputs]
        expected = operation.definition.reference(*inputs, **operation.attributes)
        operation.definition.cpu(*inputs, *outputs, **operation.attributes)
        packed = None
        for virtual, output, wanted in zip(operation.outputs, outputs, expected, strict=True):
            if virtual is None:
                continue
            where = f"{program.name}: {operation.name} -> {virtual!r}"
            assert wanted is not None, where
            assert output.shape == wanted.shape and output.dtype == wanted.dtype, where
            if virtual.dtype == torch.uint8:
                packed = (output != wanted).sum().item()
                assert packed <= max(1, output.numel() // 1000), where
            elif virtual.dtype.is_floating_point:
                limit = TOLERANCE * wanted.abs().max().item() + 1e-6 if wanted.numel() else 0.0
                difference = (output - wanted).abs().max().item() if wanted.numel() else 0.0
                assert difference <= limit, f"{where}: differs by {difference}, allowed {limit}"
            else:
                difference = (output.int() - wanted.int()).abs()
                assert difference.max() <= 1, where
                assert (difference != 0).sum() <= max(1, output.numel() // 1000), where
            values[virtual] = wanted
    return {operation.name for operation in program.operations}
