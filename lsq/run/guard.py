"""Guard mode: planned memory in which every access is checked.

A write must not overlap a living tensor. A tensor that is read must be alive, and its red zone,
MARGIN bytes behind its end, unchanged. New and dead memory is poisoned: NaN in floats, 0x80
elsewhere, which is no code.
"""

from dataclasses import dataclass

import torch

from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.planned import PlannedFrame, StepMemory
from lsq.run.step import Key

MARGIN = 256
"""Bytes of red zone behind every tensor; each byte is RED."""
RED = 0xA5
POISON = 0x80


class MemoryGuardError(RuntimeError):
    """Planned memory was read or written where the plan does not allow it."""


@dataclass(frozen=True, kw_only=True)
class Alive:
    label: str
    start: int
    end: int
    """Bytes from the start of the arena; the red zone begins at `end`."""
    last: int
    until: int | None
    """For a borrowed tensor: position of the pass after which its bytes are reused."""
    tensor: torch.Tensor


def poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(POISON)


class GuardedFrame(PlannedFrame):
    def __init__(self, memory: "GuardedMemory", node: int, **options):
        super().__init__(memory, node, **{**options, "repeated": False})
        self._writers: dict[VirtualTensor, Key] = {}

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        what, now = self._label(program, index), self._moment(program, index)
        self.memory.pass_by(now - 1, "a pass that was left out")
        for tensor in program.operations[index].inputs:
            if tensor in self._writers:
                self.memory.read(self._writers[tensor], tensor.name, what)
        made = super().tensors_for(program, index)
        for number, (tensor, virtual) in enumerate(zip(made, program.written(index), strict=True)):
            key, offset = (self.node, index, number), self.offset(index, number)
            if virtual.is_temporary:
                self._writers[virtual] = key
            if offset is not None:
                seen = self.memory.arena.tensor(offset, tensor.shape, tensor.dtype)
                self.memory.write(key, seen, offset, what)
        return made

    def done(self, program: Program, index: int) -> None:
        self.memory.pass_by(self._moment(program, index), self._label(program, index))

    def _moment(self, program: Program, index: int) -> int:
        """Return when the operation runs, counted in operations from the start of the step."""
        step = self.memory.step
        position = self.memory.positions[self.node, index >= program.forward_length]
        return step.starts[position] + index - step.passes[position].operations.start

    def _label(self, program: Program, index: int) -> str:
        direction = "backward" if index >= program.forward_length else "forward"
        name = program.operations[index].name
        return f"{name} ({direction} of {self.memory.names[self.node]})"


class GuardedMemory(StepMemory):
    """A StepMemory that checks every access; its plan needs a margin of MARGIN bytes."""

    frame = GuardedFrame

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.alive: dict[Key, Alive] = {}
        self.fired = 0

    def next_step(self) -> None:
        super().next_step()
        self.alive.clear()

    def fire(self, message: str) -> None:
        self.fired += 1
        raise MemoryGuardError(f"memory guard: {message}")

    def red_zone(self, one: Alive) -> torch.Tensor:
        return self.arena.tensor(one.end, (MARGIN,), torch.uint8)

    def check_red_zone(self, one: Alive, what: str) -> None:
        if (self.red_zone(one) != RED).any():
            self.fire(f"something wrote behind the end of {one.label}; found out {what}")

    def end_borrowed(self, position: float) -> None:
        super().end_borrowed(position)
        for key, one in list(self.alive.items()):
            if one.until is not None and one.until < position:
                self._end(key, "after it was borrowed")

    def write(self, key: Key, tensor: torch.Tensor, start: int, what: str) -> None:
        """Check that operation `what` may write `tensor` at byte `start`; then poison it."""
        buffer, borrow = self.step.buffers[key], self.step.borrowed.get(key)
        end = start + tensor.numel() * tensor.dtype.itemsize
        for other in self.alive.values():
            if start < other.end + MARGIN and other.start < end + MARGIN:
                self.fire(f"{what} writes {buffer.name} over {other.label}, which is still needed")
        one = Alive(
            label=buffer.name,
            start=start,
            end=end,
            last=buffer.last,
            tensor=tensor,
            until=borrow and borrow.until,
        )
        poison(tensor)
        self.red_zone(one).fill_(RED)
        self.alive[key] = one

    def read(self, key: Key, label: str, what: str) -> None:
        """Check the tensor of `key`, which operation `what` is about to read."""
        one = self.alive.get(key)
        if one is None:
            self.fire(f"{what} reads {label} after its planned end")
        self.check_red_zone(one, f"before {what}")

    def pass_by(self, moment: int, what: str) -> None:
        """Poison tensors after their last reader: operation `what` at `moment` of the step is
        over."""
        for key, one in list(self.alive.items()):
            if one.last <= moment and one.until is None:
                self._end(key, f"after {what}")

    def _end(self, key: Key, what: str) -> None:
        one = self.alive.pop(key)
        self.check_red_zone(one, what)
        poison(one.tensor)
