"""Steps of single matrices whose weight or moments have 8 bits: prepared once, then repeated."""

import math
from typing import Any

import torch
from torch import Tensor

from lsq.native import loader
from lsq.ops.adam import NUMBERS
from lsq.ops.compact_adam import CompactAdam, MasterWeight
from lsq.optim.moments import FIRST, SECOND, matrix, moment
from lsq.optim.updates import plain_gradient
from lsq.run.backends import Backend
from lsq.run.shards import is_shard, local, shard_number

_GOLDEN = 0x9E3779B97F4A7C15


def is_compact(parameter: Tensor, bits: int) -> bool:
    """Return whether a step of a parameter with moments of so many bits is one of these."""
    return trains_codes(parameter) or (bits == 8 and parameter.dim() > 1 and parameter.numel() > 0)


def trains_codes(parameter: Tensor) -> bool:
    """Return whether a parameter is codes (lsq.layers.trained_codes)."""
    return hasattr(type(local(parameter)), "master")


class CompactUpdate:
    """Steps of one parameter; `number`: its place among all, for its random numbers."""

    def __init__(self, backend: Backend, parameter: Tensor, state: dict[str, Any], number: int):
        self._backend, self._parameter, self._number = backend, parameter, number
        self._given = backend.allocate([NUMBERS + 1], torch.float32)
        self._key = backend.allocate([1], torch.int64)
        self._weight = _weight_of(parameter)
        self._moments = moment(state, FIRST), moment(state, SECOND)
        self._fits = self._memory(state)

    def _memory(self, state: dict[str, Any]) -> tuple:
        weight = _weight_of(self._parameter)
        moments = map(local, (state[FIRST], state[SECOND]))
        where = weight.floats, weight.codes, weight.remainder, *moments
        return tuple(one.data_ptr() for one in where if one is not None)

    def fits(self, state: dict[str, Any]) -> bool:
        return self._fits == self._memory(state)

    def run(self, gradient: Tensor, numbers: Tensor, factor: float | Tensor, step: int) -> None:
        """Step with numbers [NUMBERS] and a gradient times `factor`."""
        self._given[:NUMBERS].copy_(numbers, non_blocking=True)
        self._given[NUMBERS:].copy_(torch.as_tensor(factor).view(1), non_blocking=True)
        self._key.fill_(_key(step, self._number, shard_number(self._parameter)))
        first, second = self._moments
        operation = CompactAdam(
            weight=self._weight,
            first=first,
            second=second,
            gradient=matrix(plain_gradient(gradient, self._parameter)),
            numbers=self._given[:NUMBERS],
            gradient_factor=self._given[NUMBERS:],
            key=self._key,
        )
        self._backend.run(operation)
        if self._weight.codes is not None:
            local(self._parameter).changed()
        elif not is_shard(self._parameter):
            torch.autograd.graph.increment_version(self._parameter)


def norm_of(gradient: Tensor) -> float:
    """Return the norm of a gradient, or of this process's shard of it; the number of threads does
    not change it."""
    gradient = local(gradient)
    if gradient.device.type != "cpu" or not loader.available():
        return gradient.double().norm().item()
    plain, square = gradient.float().contiguous(), torch.empty(1, dtype=torch.float64)
    loader.call("lsq_sum_of_squares", plain, plain.numel(), square)
    return math.sqrt(square.item())


def _weight_of(parameter: Tensor) -> MasterWeight:
    own = local(parameter).detach()
    return own.master if trains_codes(own) else MasterWeight(floats=matrix(own))


def _key(step: int, number: int, shard: int) -> int:
    """Return the key of a step's random numbers: the same in every process that holds the same
    shard, and after a resume."""
    mixed = ((number + 1) << 40 ^ shard << 28 ^ step) * _GOLDEN % 2**64
    return mixed - 2**63
