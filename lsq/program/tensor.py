"""What a program is made of: virtual tensors, operations on them, and the groups in which they travel."""

from dataclasses import dataclass, field

import torch

from lsq.ops.registry import OpDefinition


@dataclass(eq=False, kw_only=True)
class VirtualTensor:
    """A tensor that does not exist yet. Tensors are equal only to themselves."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    role: str = "temporary"
    """"input", "parameter", "output", "gradient" (of an input or parameter) or "temporary"."""

    @property
    def size(self) -> int:
        """Bytes."""
        numel = 1
        for length in self.shape:
            numel *= length
        return numel * self.dtype.itemsize

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """One call of a fused operation; inputs and outputs that the call does without are None."""

    definition: OpDefinition
    inputs: tuple[VirtualTensor | None, ...]
    outputs: tuple[VirtualTensor | None, ...]
    attributes: dict = field(default_factory=dict)
    scratch: tuple[VirtualTensor, ...] = ()
    """What its implementation uses for itself while it runs."""

    @property
    def written(self) -> tuple[VirtualTensor | None, ...]:
        """Outputs and scratch: everything that needs memory when it runs."""
        return (*self.outputs, *self.scratch)

    @property
    def name(self) -> str:
        return self.definition.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Rounded:
    """An activation as codes. Its gradient, filed under `codes`, is the gradient before the rounding."""

    codes: VirtualTensor
    scale: VirtualTensor
    clipped: VirtualTensor
    error: VirtualTensor | None
    clip: VirtualTensor
    source: VirtualTensor
    """What is named in gradients: the float tensor that was rounded, or the codes where none existed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundedWeight:
    """A weight as codes [N, K] with scale [N]."""

    codes: VirtualTensor
    scale: VirtualTensor
    parameter: VirtualTensor | None
    clip: VirtualTensor | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """What a product left: codes with a clip, int32 sums with a scale, or float values alone."""

    value: VirtualTensor
    scale: VirtualTensor | None = None
    clipped: VirtualTensor | None = None
    error: VirtualTensor | None = None
    clip: VirtualTensor | None = None
    weight_scale: VirtualTensor | None = None
