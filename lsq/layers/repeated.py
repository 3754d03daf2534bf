"""Passes in eval mode that run again as they were, since nothing that they read has changed."""

from collections.abc import Mapping
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsq.layers.weight_state import rounded_weights, rows_of
from lsq.run.executor import Execution
from lsq.run.parameter_state import Stamp

if TYPE_CHECKING:
    from lsq.layers.module import ProgramModule


class RepeatedPass:
    """A pass without gradients, with all its tensors but the inputs of the call.

    It runs again while the module has the same parameters, and those have the same values that it
    does not read themselves, but as codes, padded or joined.
    """

    def __init__(self, module: "ProgramModule", execution: Execution, tensors: dict[str, Tensor]):
        program = execution.program
        self._execution, self._tensors, self._rows = execution, dict(tensors), rows_of(program)
        self._backend = module.backend
        self._names = [virtual.name for virtual in program.parameters]
        self._parts = [part for name in self._names for part in module.sources(name)]
        rounded = {name for one in rounded_weights(program) for name in (one.name, one.clip)}
        self._made_from = []
        for name in self._names:
            parts, value = module.sources(name), tensors[name]
            if name in rounded or parts[0] is not value:
                self._made_from += parts
            if name in rounded and parts[0] is not value:  # its codes are read, and its size
                self._tensors[name] = torch.empty_like(value, device="meta")
        self._stamp = Stamp(self._made_from)

    @classmethod
    def of(
        cls, module: "ProgramModule", execution: Execution, tensors: dict[str, Tensor]
    ) -> "RepeatedPass | None":
        """Return None if the pass depends on more than its inputs and plain parameters."""
        program = execution.program
        parts = [one for virtual in program.parameters for one in module.sources(virtual.name)]
        plain = all([type(part) is nn.Parameter for part in parts])
        return cls(module, execution, tensors) if plain and not program.draws else None

    def holds(self, module: "ProgramModule") -> bool:
        """Whether nothing has changed that the pass reads besides its inputs."""
        if module.backend is not self._backend:
            return False
        parts = [part for name in self._names for part in module.sources(name)]
        same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        return same and self._stamp.holds(self._made_from, rows=self._rows)

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return self._execution({**self._tensors, **inputs})
