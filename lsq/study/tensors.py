"""Tensors to measure: matrices [R, C] whose rows a product sums; of large ones a sample of rows."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lsq.config import require_model
from lsq.quant.numbers import as_matrix

WEIGHT, ACTIVATION, GRADIENT = KINDS = ("weight", "activation", "gradient")
"""Activations are inputs of products; gradients are of products' outputs."""
PLURALS = {kind: kind + "s" for kind in KINDS}
LARGEST_SAMPLE = 2**18
WIDEST_KERNEL = 16
"""A third dimension narrower than this is the kernel of a convolution."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    name: str
    kind: str
    shape: tuple[int, int]
    values: Tensor
    """float32 [r, C]: whole rows, evenly spaced among those that are not all zeros."""
    unusable: int
    zero_rows: int

    @property
    def problem(self) -> str | None:
        """The reason why no error is measured, or None."""
        if 0 in self.shape:
            return "it has no values"
        if self.unusable:
            return f"{self.unusable} of {math.prod(self.shape)} values are NaN or infinite"
        return None if len(self.values) else "all its values are zero"


@torch.no_grad()
def take(name: str, kind: str, tensor: Tensor, largest: int = LARGEST_SAMPLE) -> Sample:
    """Sample rows, except rows of zeros, with about `largest` values of a tensor's matrix."""
    shape = as_matrix(tensor.shape)
    matrix = tensor.detach().reshape(shape)
    rows = (matrix != 0).any(1).nonzero().flatten()
    count = min(len(rows), max(1, largest // max(shape[1], 1)))
    chosen = rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]
    # in float32, where large values become infinite
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
    """Put the dimensions that a product sums last: kernels [O, I, ...] become [O, -1]."""
    is_kernel = weight.dim() > 3 or weight.dim() == 3 and weight.shape[2] < WIDEST_KERNEL
    return weight.flatten(1) if is_kernel and weight.numel() else weight


def weights_of(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of float tensors of two or more dimensions; shared tensors once."""
    seen = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.is_floating_point():
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            if not tensor.numel() or key not in seen:
                seen.add(key)
                yield name, tensor


def chosen_by(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return names that a pattern fits, all without patterns; ValueError if a pattern fits none."""
    names, patterns = list(names), list(patterns)
    chosen = set() if patterns else set(names)
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        chosen.update(fitting)
        if not fitting:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ValueError(
                f"no tensor is called {pattern!r}; there are {shown or 'none'} (* stands for any"
                " part of a name)"
            )
    return chosen


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model by name; ValueError if it has none."""
    require_model(model)
    weights = dict(weights_of(model.named_parameters()))
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has no float parameter with two or more dimensions"
        )
    return weights
