"""Where the tensors of a running program come from: fresh memory, or the places of a step's plan.

A *frame* is the memory of one run of a program, from its forward pass to the end of its backward pass. It hands out
the tensors that operations write.
"""

import weakref

import torch

from lsq.memory.arena import Arena
from lsq.program.program import Program
from lsq.program.step import StepPlan, signature
from lsq.program.tensor import Operation, VirtualTensor

ADVICE = "plan again with the step as it is now, or run without a plan (--lsq-memory naive)"


def allocate(tensor: VirtualTensor) -> torch.Tensor:
    """Fresh memory for a virtual tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class FreshFrame:
    """Every tensor in memory of its own."""

    def written(self, index: int, operation: Operation) -> list[torch.Tensor | None]:
        """Tensors for operation `index` to write into."""
        return [None if tensor is None else allocate(tensor) for tensor in operation.written]

    def done(self, index: int, operation: Operation) -> None:
        """Operation `index` has run."""

    def begin_backward(self) -> None:
        """The backward pass is about to run."""

    def close(self) -> None:
        """Nothing of the run is needed any more."""


class StepMemory:
    """The arena of one model's training step, and the order in which it is used.

    Runs must follow the planned order, else tensors would lie where others still live: a program that runs out of
    turn, twice, or with a larger batch is refused. Programs of the plan may be left out. A step begins with the first
    run after every earlier one is over: its backward pass has run, or its graph is gone.

    Args:
        step: the plan.
        owners: the module of each node.
        names: of the nodes, for messages.
    """

    def __init__(self, step: StepPlan, owners: list[object], names: tuple[str, ...]):
        self.step = step
        self.names = names
        self.arena = Arena(step.plan.capacities)
        self._owners = [id(owner) for owner in owners]
        self._forward = {one.node: position for position, one in enumerate(step.passes) if not one.backward}
        self._backward = {one.node: position for position, one in enumerate(step.passes) if one.backward}
        self._programs = {one.node: one.program for one in step.passes}
        self._fitting: dict[int, weakref.WeakSet[Program]] = {node: weakref.WeakSet() for node in self._programs}
        self._open: set[int] = set()
        self._position = -1

    def __deepcopy__(self, memo):
        return None  # a copy of a model has its own steps, which nobody has planned yet

    def __reduce__(self):
        return type(None), ()

    def open(self, owner: object, program: Program) -> "PlannedFrame":
        """The frame of a forward pass of `program`, which `owner` runs next.

        Raises:
            RuntimeError: the plan has no such run at this point.
            ValueError: the batch is larger than planned.
        """
        if not self._open:
            self._position = -1
        for node, identity in enumerate(self._owners):
            if identity == id(owner) and self._forward[node] > self._position:
                self._check(node, program)
                self._position = self._forward[node]
                self._open.add(node)
                return self._frame(node, program)
        planned = [self.names[node] for node, identity in enumerate(self._owners) if identity == id(owner)]
        raise RuntimeError(
            f"{planned[0] if planned else program.name} runs {'again or ' if planned else ''}out of the order that "
            f"memory was planned for, while {len(self._open)} earlier runs still await their backward pass; {ADVICE}"
        )

    def _frame(self, node: int, program: Program) -> "PlannedFrame":
        return PlannedFrame(self, node)

    def _check(self, node: int, program: Program) -> None:
        if program in self._fitting[node]:
            return
        planned = self._programs[node]
        if signature(program) != signature(planned):
            raise RuntimeError(f"{self.names[node]} runs other operations than memory was planned for; {ADVICE}")
        for operation, places in zip(program.operations, self.step.places[node], strict=True):
            for tensor, place in zip(operation.written, places, strict=True):
                if place is not None and tensor.size > place[2]:
                    largest = next(one for one in planned.inputs if one.name == program.inputs[1].name)
                    raise ValueError(
                        f"the batch is too large for the planned memory: {self.names[node]} got "
                        f"{program.inputs[1].name} {program.inputs[1].shape} and needs {tensor.size} bytes for "
                        f"{tensor.name}; planned were {largest.shape} and {place[2]} bytes. Plan for larger batches "
                        "(--max-tokens, --max-source-positions, --max-target-positions), or make smaller ones"
                    )
        self._fitting[node].add(program)

    def turn_back(self, node: int) -> None:
        """The backward pass of `node` is next.

        Raises:
            RuntimeError: the order is not the planned one.
        """
        if self._backward.get(node, -1) < self._position:
            raise RuntimeError(f"the backward pass of {self.names[node]} comes out of the planned order; {ADVICE}")
        self._position = self._backward[node]

    def close(self, node: int) -> None:
        """A run is over."""
        self._open.discard(node)


class PlannedFrame(FreshFrame):
    """Tensors at the places of a plan; what crosses a border gets fresh memory."""

    def __init__(self, memory: StepMemory, node: int):
        self.memory, self.node = memory, node
        self._places = memory.step.places[node]
        self._closed = False

    def written(self, index: int, operation: Operation) -> list[torch.Tensor | None]:
        return [
            None if tensor is None else self._tensor(tensor, place)
            for tensor, place in zip(operation.written, self._places[index], strict=True)
        ]

    def _tensor(self, tensor: VirtualTensor, place) -> torch.Tensor:
        if place is None:
            return allocate(tensor)
        return self.memory.arena.tensor(place[0], place[1], tensor.shape, tensor.dtype)

    def begin_backward(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the saved tensors of {self.memory.names[self.node]} are gone: its backward pass has run already; "
                f"{ADVICE}"
            )
        self.memory.turn_back(self.node)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.memory.close(self.node)

    def __del__(self):
        self.close()
