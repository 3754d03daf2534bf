"""Tensors to measure, as matrices [R, C] whose rows are what a product sums over; large ones by a
sample of rows."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lsq.config import require_model
from lsq.quant.numbers import as_matrix

WEIGHT, ACTIVATION, GRADIENT = KINDS = ("weight", "activation", "gradient")
"""Activations are what products read; gradients are those of what products give."""
LARGEST_SAMPLE = 2**18
"""Values of a tensor that are looked at, unless another number is asked for."""
WIDEST_KERNEL = 16
"""The last dimension of a convolution's kernel is smaller than this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """What is looked at of one tensor."""

    name: str
    kind: str
    """One of KINDS."""
    shape: tuple[int, int]
    """Of the whole matrix."""
    values: Tensor
    """float32 [r, C]: whole rows, evenly spaced among those that are not all zeros."""
    unusable: int
    """NaN and infinities in the whole matrix."""
    zero_rows: int
    """Rows of zeros in the whole matrix."""

    @property
    def problem(self) -> str | None:
        """Why no error is measured, or None."""
        if 0 in self.shape:
            return "it has no values"
        if self.unusable:
            return f"{self.unusable} of {math.prod(self.shape)} values are NaN or infinite"
        return None if len(self.values) else "all its values are zero"


@torch.no_grad()
def take(name: str, kind: str, tensor: Tensor, largest: int = LARGEST_SAMPLE) -> Sample:
    """A sample of a tensor: whole rows of its matrix, one at least, with about `largest` values.

    Rows of zeros, as padding leaves them, are counted and left out.

    Args:
        name, kind: see Sample.
        tensor: of any shape and float dtype; it may change afterwards.
        largest: values to keep.
    """
    shape = as_matrix(tensor.shape)
    matrix = tensor.detach().reshape(shape)
    rows = (matrix != 0).any(1).nonzero().flatten()
    count = min(len(rows), max(1, largest // max(shape[1], 1)))
    chosen = rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]
    # where large values become infinite
    narrow = matrix.float() if matrix.dtype.itemsize > 4 else matrix
    return Sample(
        name=name,
        kind=kind,
        shape=shape,
        values=matrix[chosen].to(device="cpu", dtype=torch.float32, copy=True),
        unusable=matrix.numel() - int(narrow.isfinite().sum()),
        zero_rows=shape[0] - len(rows) if shape[1] else 0,
    )


def as_rows(weight: Tensor) -> Tensor:
    """A weight with what a product sums over last: kernels of convolutions [O, I, ...] become [O,
    -1]."""
    is_kernel = weight.dim() > 3 or weight.dim() == 3 and weight.shape[2] < WIDEST_KERNEL
    return weight.flatten(1) if is_kernel and weight.numel() else weight


def is_weight(tensor: object) -> bool:
    """Whether something is a float tensor of two or more dimensions."""
    return isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.is_floating_point()


def weights_of(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of those that `is_weight`, each once, whatever names share its memory."""
    seen = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if is_weight(tensor):
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            if not tensor.numel() or place not in seen:
                seen.add(place)
                yield name, tensor


def chosen_by(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Those of the names that any pattern with * and ? fits; all if there is none.

    Raises:
        ValueError: a pattern fits nothing.
    """
    names, patterns = list(names), list(patterns)
    found = {
        pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns
    }
    for pattern, fitting in found.items():
        if not fitting:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ValueError(
                f"no tensor is called {pattern!r}; there are {shown or 'none'} (* stands for any"
                " part of a name)"
            )
    return {name for fitting in found.values() for name in fitting} if patterns else set(names)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights of a model by name."""
    require_model(model)
    return dict(weights_of(model.named_parameters()))
