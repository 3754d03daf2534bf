"""What an operation is: one declared class, with its reference, its gradient and its
implementations.

`reference` is plain PyTorch and what every implementation is tested against. `cpu` and `cuda` write
into tensors that
are already allocated: `cpu` at once, `cuda` by the launches and products that it returns
(lsq.native.launch), so that many operations can be replayed as one list. M rows, N columns wherever
shapes are given.
"""

from collections.abc import Callable, Sequence

import torch

from lsq.native import loader
from lsq.native.launch import Launch, Product
from lsq.program.declare import Declared
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Value, Weight

Spec = tuple[tuple[int, ...], torch.dtype]
"""(shape, dtype) of scratch memory."""


class Operation(Declared):
    """A fused operation.

    Subclasses declare fields (see lsq.native.declarations) and override what follows.
    """

    fields = ()
    may_hide = ("gradient",)
    """What an operation of a backward pass reads; it has no gradient of its own."""
    product_weight: Weight | None = None
    """Of an operation whose result is a product with its end: the weight."""
    product_bias = None
    """The bias in it, if any."""

    def reference(self) -> tuple[torch.Tensor | None, ...]:
        """The results, in the order of the written fields; None for what is not wanted."""
        raise NotImplementedError

    def gradient(self, builder) -> None:
        """Append the operations of the backward pass to a lsq.program.builder.Builder."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def cpu_scratch(self) -> Sequence[Spec]:
        """What `cpu` needs for itself while it runs; shapes and dtypes alone decide, and no size
        falls as they grow."""
        return ()

    def cpu(self, *scratch: torch.Tensor) -> None:
        """Run on the CPU. As it stands here: by the C++ loop of the same name."""
        loader.run(self)

    def cuda_scratch(self) -> Sequence[Spec]:
        """What `cuda` needs for itself."""
        return ()

    def cuda(self, *scratch: torch.Tensor) -> list[Launch | Product]:
        """Launches and products that will run on a GPU.

        Raises:
            ValueError: kernels cannot take these shapes.
        """
        raise ValueError(f"operation {type(self).__name__} has no CUDA implementation")

    def leave_sums(self, tensor: Callable[..., VirtualTensor]) -> Sequence[Value]:
        """From now on leave sums over rows in parts, in a program for a GPU; what has to be added
        up then.

        `tensor` makes a virtual tensor of a name, a shape and a dtype. See lsq.ops.sums.
        """
        return ()

    def unrounded(self, run: Callable[["Operation"], None]) -> torch.Tensor:
        """The float values that are rounded under a clip here; calibration measures those.

        As it stands here, for operations with a result `out` of floats: `run` runs this one without
        its rounding.
        """
        rounding, one = self.rounding(), self.bind(lambda tensor: tensor)
        for field in self.fields:
            if getattr(self, field.name) is rounding:
                setattr(one, field.name, None)
        if one.out is None:
            floats = (leaf.of(self) for leaf in self.leaves() if leaf.kind == "Activations")
            dtype = next((tensor.dtype for tensor in floats if tensor is not None), torch.float32)
            one.out = torch.empty_like(rounding.codes, dtype=dtype)
        run(one)
        return one.out

    @property
    def same_values(self) -> tuple:
        """Tensors that have the same values, but for a rounding, and so share a gradient; None
        where one is missing."""
        return ()

    def limits(self) -> dict[str, int]:
        """By the names of fields of Indices and Offsets: what indices stay below, and where offsets
        end."""
        return {}

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def inputs(self) -> tuple:
        """Every tensor that is read."""
        return self._tensors(written=False)

    @property
    def outputs(self) -> tuple:
        """Every tensor that is written."""
        return self._tensors(written=True)

    def _tensors(self, written: bool) -> tuple:
        found = (leaf.of(self) for leaf in self.leaves() if leaf.written == written)
        return tuple(tensor for tensor in found if tensor is not None)

    def rounding(self) -> Coded | None:
        """The value that is rounded under a clip here, if any."""
        for field in self.fields:
            value = getattr(self, field.name)
            if field.direction == "Out" and isinstance(value, Coded) and value.clip is not None:
                return value
        return None

    def store(self, results: Sequence[torch.Tensor | None]) -> None:
        """Copy what `reference` returned into the tensors that are written."""
        places = [leaf.of(self) for leaf in self.leaves() if leaf.written]
        for place, result in zip(places, results, strict=True):
            if place is not None:
                place.copy_(result)
