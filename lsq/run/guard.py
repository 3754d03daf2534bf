"""Guard mode: planned memory in which nothing goes unnoticed.

* A tensor that is written must not overlap one that the plan still has alive.
* A tensor that is read must be alive by the plan, and its red zone, MARGIN bytes behind its end,
  untouched.
* What is written begins as poison, and what has died becomes poison: NaN, or 0x80, which no code
  is. Should a kernel read where it must not, its results show it.
"""

from dataclasses import dataclass

import torch

from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.planned import PlannedFrame, StepMemory
from lsq.run.step import Key, is_placed, operations_of

MARGIN = 256
"""Bytes of red zone behind every tensor."""
RED = 0xA5
"""The byte in red zones."""
POISON = 0x80
"""The byte in dead memory; floating-point tensors hold NaN."""


class MemoryGuardError(RuntimeError):
    """Planned memory was read or written where the plan does not allow it."""


@dataclass(frozen=True, kw_only=True)
class Alive:
    """A tensor that the plan has alive."""

    label: str
    start: int
    end: int
    """Bytes from the start of the arena; `end` is where the red zone begins."""
    last: int
    """The last operation of the step that may read it."""
    until: int | None
    """If it is borrowed: position of the pass after which its bytes are reused."""
    tensor: torch.Tensor


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with bytes of POISON."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(POISON)


class GuardedFrame(PlannedFrame):
    """A PlannedFrame that reports every access to its memory."""

    def __init__(self, memory: "GuardedMemory", node: int, program: Program, **options):
        super().__init__(memory, node, program, **{**options, "repeated": False})
        self._length = program.forward_length
        self._writers: dict[VirtualTensor, tuple[int, int]] = {
            tensor: (index, number)
            for index in range(len(program.operations))
            for number, tensor in enumerate(program.written(index))
            if is_placed(tensor)
        }

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        operation = program.operations[index]
        what = self._label(index, operation)
        now = self.memory.moment(self.node, index >= self._length, index)
        self.memory.pass_by(now - 1, "a pass that was left out")
        for tensor in operation.inputs:
            if tensor in self._writers:
                self.memory.read((self.node, *self._writers[tensor]), tensor.name, what)
        made = super().tensors_for(program, index)
        for number, tensor in enumerate(made):
            offset = self.offset(index, number)
            if offset is not None:
                seen = self.memory.arena.tensor(offset, tensor.shape, tensor.dtype)
                self.memory.write((self.node, index, number), seen, offset, what)
        return made

    def done(self, program: Program, index: int) -> None:
        moment = self.memory.moment(self.node, index >= self._length, index)
        self.memory.pass_by(moment, self._label(index, program.operations[index]))

    def _label(self, index: int, operation: Operation) -> str:
        direction = "backward" if index >= self._length else "forward"
        return f"{operation.name} ({direction} of {self.memory.names[self.node]})"


class GuardedMemory(StepMemory):
    """A StepMemory that checks every access.

    Its plan needs a margin of MARGIN bytes behind every tensor.
    """

    frame = GuardedFrame

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.alive: dict[Key, Alive] = {}
        self.fired = 0
        """Faults found."""

    def next_step(self) -> None:
        super().next_step()
        self.alive.clear()

    def fire(self, message: str) -> None:
        """Report a fault.

        Raises:
            MemoryGuardError: always.
        """
        self.fired += 1
        raise MemoryGuardError(f"memory guard: {message}")

    def moment(self, node: int, backward: bool, index: int) -> int:
        """The operation `index` of a node's program in the count of the step."""
        position = self._positions[node, backward]
        return self.step.starts[position] + index - operations_of(self.step.passes[position]).start

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
        """`tensor` at byte `start` comes alive, to be written by operation `what`."""
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
        """Operation `what` is about to read the tensor of `key`."""
        one = self.alive.get(key)
        if one is None:
            self.fire(f"{what} reads {label} after its planned end")
        self.check_red_zone(one, f"before {what}")

    def pass_by(self, moment: int, what: str) -> None:
        """Operation `what` at `moment` of the step is over: poison what it was the last to read."""
        for key, one in list(self.alive.items()):
            if one.last <= moment and one.until is None:
                self._end(key, f"after {what}")

    def _end(self, key: Key, what: str) -> None:
        one = self.alive.pop(key)
        self.check_red_zone(one, what)
        poison(one.tensor)
