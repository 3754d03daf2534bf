"""Plausible random tensors for whatever a program needs from outside, for checks and benchmarks."""

import torch

from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor

KEY = torch.tensor([-(2**62) + 12345], dtype=torch.int64)
"""A random key whose both halves are used."""
SMALLEST_TABLE = 5
"""Words and places are below this, so that they fit any vocabulary and any table of positions."""


def random_tensor(virtual: VirtualTensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor for an input or parameter, by its name and dtype, on the CPU."""
    if virtual.name == "random_key":
        return KEY
    if virtual.dtype == torch.bool:
        mask = torch.rand(virtual.shape, generator=generator) < 0.3
        mask[:, 0] = False
        return mask
    if virtual.dtype == torch.int64:
        return torch.randint(0, SMALLEST_TABLE, virtual.shape, generator=generator)
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


def border_tensors(program: Program, seed: int = 0) -> dict[VirtualTensor, torch.Tensor]:
    """Random tensors for every input, parameter and gradient of an output."""
    generator = torch.Generator().manual_seed(seed)
    borders = (*program.inputs, *program.parameters, *program.output_gradients)
    return {virtual: random_tensor(virtual, generator) for virtual in borders}
