"""The float fallback of a module whose quantisation is too noisy."""

from collections.abc import Iterable
from dataclasses import is_dataclass, replace

import torch

from lsq.config import QuantConfig
from lsq.layers.programs import Vocabulary, origins
from lsq.program.program import Program


def in_floats(program: Program) -> Program:
    """Return `program` in float mode: it has the same inputs, except codes of weights.

    A vocabulary is not padded there, so that its logits are fewer.
    """
    origin = origins[program]
    return origin.build(**{name: _in_floats(value) for name, value in origin.arguments.items()})


def _in_floats(value: object) -> object:
    if isinstance(value, QuantConfig):
        return replace(value, mode="float")
    if isinstance(value, Vocabulary):
        return replace(value, padded=value.words)
    if is_dataclass(value) and isinstance(getattr(value, "quant", None), QuantConfig):
        return replace(value, quant=_in_floats(value.quant))
    return value


def held(y: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """y, which depends on `parameters` for autograd, though they count for nothing and get no
    gradient.

    DistributedDataParallel waits for every parameter that it was given.
    """
    return _Held.apply(y, *parameters)


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, *parameters):
        ctx.count = len(parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(None,) * ctx.count
