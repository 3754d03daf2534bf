"""Frames off planned memory: every run takes memory of its own, and gives it back.

A pass is prepared once and then runs as a whole. What crosses its borders (inputs, parameters,
results, what is saved) are tensors of their own; what lives inside it alone shares a workspace, in
which other passes work before and after.
"""

import torch

from lsq.memory.kept import room
from lsq.memory.workspace import Room, Workspace
from lsq.program.backend import Backend
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.frames import Frame, Values, fresh
from lsq.run.prepared import PreparedPass
from lsq.run.step import is_placed


class FreshFrame(Frame):
    """Every tensor in memory of its own on a device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        return [self._home(tensor) for tensor in program.written(index)]

    def _home(self, tensor: VirtualTensor) -> torch.Tensor:
        home = self.homes.pop(tensor, None)
        return fresh(tensor, self._device) if home is None else home

    def run_prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> bool:
        if not backend.refillable:
            return False
        key = indices.start, backend
        passes = program.prepared.get(key) or program.prepared.setdefault(
            key, FreshPasses(program, indices)
        )
        for tensor in passes.handed_on:
            values[tensor] = self._home(tensor)
        passes.run(program, indices, backend, values)
        return True


class FreshPasses:
    """The operations `indices` of a program, prepared in as many rooms as there are threads that
    run them at a time.

    Attributes:
        handed_on: what they write that is needed afterwards.
    """

    def __init__(self, program: Program, indices: range):
        written = [tensor for index in indices for tensor in program.written(index)]
        self._inside = [
            one for one in written if is_placed(one) and program.lifetimes[one][1] in indices
        ]
        self.handed_on = [one for one in written if one not in set(self._inside)]
        self._prepared: dict[Room, tuple[Workspace, PreparedPass]] = {}

    def run(self, program: Program, indices: range, backend: Backend, values: Values) -> None:
        """Run them on `values`, which has all that crosses their borders."""
        with room(backend.place) as found:
            if found not in self._prepared:
                self._prepared[found] = self._prepare(found, program, indices, backend, values)
            workspace, prepared = self._prepared[found]
            with workspace.opened() as moved:
                if moved:
                    prepared.follow()
                prepared.run(values)

    @torch.inference_mode(False)  # the next run may be where gradients are
    def _prepare(
        self, found: Room, program: Program, indices: range, backend: Backend, values: Values
    ) -> tuple[Workspace, PreparedPass]:
        workspace = Workspace(found, [(one.size, *program.lifetimes[one]) for one in self._inside])
        inside = {
            one: workspace.tensor(number, one.shape, one.dtype)
            for number, one in enumerate(self._inside)
        }
        return workspace, PreparedPass(program, indices, backend, inside=inside, borders=values)
