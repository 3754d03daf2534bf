"""Operations: declared classes, each with its reference, its gradient and its implementations.

`reference` is plain PyTorch, against which the others are tested. `cpu` writes into allocated
tensors at once. `cuda` returns launches and products (lsq.native.launch) that will do so: many
operations can then be replayed as one list. M rows, N columns.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import torch

from lsq.native import loader
from lsq.native.launch import Launch, Product
from lsq.program import cuda
from lsq.program.cuda import Spec
from lsq.program.declare import Declared
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Value, Weight


class Operation(Declared):
    """A fused operation.

    Subclasses declare fields (see lsq.native.declarations) and override the methods below. Their
    CUDA launches are in a separate file (lsq.program.cuda).
    """

    fields = ()
    may_hide = ("gradient",)
    """A backward operation may have a field `gradient`, as it has no gradient itself."""
    product_weight: Weight | None = None
    """The weight of a product; None unless the result is a product with its epilogue."""
    product_bias = None
    """The bias of that product, if any."""

    def reference(self) -> dict:
        """Return the written fields by name; other names are ignored. A value is a dict of its
        fields, an array of values a list of such dicts."""
        raise NotImplementedError

    def gradient(self, builder) -> None:
        """Append the operations of the backward pass to a lsq.program.builder.Builder."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def cpu_scratch(self) -> Sequence[Spec]:
        """Return the scratch memory of `cpu`; it depends on, and grows with, shapes and dtypes."""
        return ()

    def cpu(self, *scratch: torch.Tensor) -> None:
        """Run on the CPU; by default the C++ loop of the same name."""
        loader.run(self)

    def cuda_scratch(self) -> Sequence[Spec]:
        return cuda.scratch_of(self)

    def cuda(self, *scratch: torch.Tensor) -> list[Launch | Product]:
        """Return launches and products that will run on a GPU. Raises ValueError: kernels cannot
        take these shapes."""
        found = cuda.launches(self, *scratch)
        return [found] if isinstance(found, Launch) else found

    def leave_sums(self, tensor: Callable[..., VirtualTensor]) -> Sequence[Value]:
        """Leave partial sums over rows, in a program for a GPU; return them, to be added up."""
        return tuple(left for sums in cuda.kernel_sums(self) for left in sums.leave(tensor))

    def unrounded(self, run: Callable[["Operation"], None]) -> torch.Tensor:
        """Return the float values that this operation rounds under a clip, for calibration. By
        default, `run` runs it without the rounding, with a float result `out`."""
        rounding, bare = self.rounding(), self.bind(lambda tensor: tensor)
        for field in self.fields:
            if getattr(self, field.name) is rounding:
                setattr(bare, field.name, None)
        if bare.out is None:
            floats = (leaf.of(self) for leaf in self.leaves() if leaf.kind == "Activations")
            dtype = next((tensor.dtype for tensor in floats if tensor is not None), torch.float32)
            bare.out = torch.empty_like(rounding.codes, dtype=dtype)
        run(bare)
        return bare.out

    @property
    def same_values(self) -> tuple:
        """Tensors with the same values, but for rounding, that share a gradient; some are None."""
        return ()

    def limits(self) -> dict[str, int]:
        """Return name of field -> bound (excluded) of Indices, or last value of Offsets."""
        return {}

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def inputs(self) -> tuple:
        return self._tensors(written=False)

    @property
    def outputs(self) -> tuple:
        return self._tensors(written=True)

    def _tensors(self, written: bool) -> tuple:
        tensors = (leaf.of(self) for leaf in self.leaves() if leaf.written == written)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def rounding(self) -> Coded | None:
        """Return the value that this operation rounds under a clip, if any."""
        for field in self.fields:
            value = getattr(self, field.name)
            if field.direction == "Out" and isinstance(value, Coded) and value.clip is not None:
                return value
        return None

    def store(self, results: dict) -> None:
        """Copy the results of `reference` into the written tensors."""
        for leaf in self.leaves():
            tensor = leaf.of(self) if leaf.written else None
            if tensor is not None:
                tensor.copy_(functools.reduce(operator.getitem, leaf.path, results))
