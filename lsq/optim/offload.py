"""Moments and remainders in a scratch file, from which each step reads those of its matrix."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lsq.memory.scratch import Scratch, room
from lsq.optim.compact import trains_codes
from lsq.run.shards import is_shard

State = dict[str, Any]


class Offload:
    """The file of one optimizer. `states`: parameter -> its state, whose tensors move to the file.

    Each step asks the system for the memory of the matrix that stepped next in the last pass.
    """

    def __init__(self, folder: str | os.PathLike, states: Mapping[Tensor, State]):
        remainders = {
            id(one.codes): one.codes.remainder
            for one in states
            if trains_codes(one) and one.codes.remainder is not None
        }
        tensors = [one for state in states.values() for one in _tensors(state).values()]
        size = sum(room(one.nbytes) for one in (*remainders.values(), *tensors))
        self._scratch = Scratch(folder, max(size, 1))
        self._spans: dict[Tensor, list[tuple[int, int]]] = {}
        self._slots: dict[Tensor, dict[str, Tensor]] = {}
        self._next: dict[Tensor, Tensor] = {}
        self._last: Tensor | None = None
        whole = {}
        for number, remainder in remainders.items():
            first = self._scratch.end
            remainder.set_(self._moved(remainder))
            whole[number] = first, remainder.shape[1]
        for parameter, state in states.items():
            first = self._scratch.end
            self._slots[parameter] = {
                name: self._moved(one) for name, one in _tensors(state).items()
            }
            state |= self._slots[parameter]
            self._spans[parameter] = [(first, self._scratch.end)]
            if trains_codes(parameter) and id(parameter.codes) in whole:
                first, columns = whole[id(parameter.codes)]
                rows = parameter.first, parameter.last
                self._spans[parameter].append(tuple(first + row * columns for row in rows))

    def _moved(self, tensor: Tensor) -> Tensor:
        return self._scratch.tensor(tensor.shape, tensor.dtype).copy_(tensor)

    def hold(self, parameter: Tensor, state: State) -> None:
        """Move a loaded state to the parameter's place in the file."""
        for name, slot in self._slots.get(parameter, {}).items():
            if name in state and state[name] is not slot:
                state[name] = slot.copy_(state[name])

    def stepping(self, parameter: Tensor) -> None:
        """Prefetch what the next matrix needs, while this one steps."""
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter
        for span in self._spans.get(self._next.get(parameter), []):
            self._scratch.prefetch(*span)


def _tensors(state: State) -> dict[str, Tensor]:
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


def check_places(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless there are matrices to step alone, all on the CPU and whole."""
    if not parameters:
        raise ValueError(
            "no matrix has a weight or moments of 8 bits, and others stay in memory; call"
            " lsq.train_codes(model) before, or make Adam(..., moment_bits=8)"
        )
    for parameter in parameters:
        if is_shard(parameter):
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is a shard of FSDP2; offload moves what"
                " belongs to whole parameters"
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is on {parameter.device}; offload moves what"
                " is in the CPU's memory"
            )
