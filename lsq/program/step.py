"""A whole training step as one sequence of operations: lifetimes across programs, and a place for every tensor.

The passes of a rehearsed step follow each other in one count of operations. What a forward pass saves lives until the
backward pass of the same node has read it for the last time; everything else dies inside its pass, so temporaries of
all layers share their bytes. What crosses a program's border (inputs, parameters, outputs, gradients) belongs
to others and stays with PyTorch's allocator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lsq.memory.buffer import Buffer, Plan
from lsq.memory.planner import plan
from lsq.program.program import Program
from lsq.program.rehearsal import Pass
from lsq.program.tensor import VirtualTensor

Place = tuple[int, int, int]
"""Segment, offset in bytes, and bytes reserved there."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """Where every tensor of a step lies."""

    passes: tuple[Pass, ...]
    starts: tuple[int, ...]
    """The first operation of each pass, in the count of the whole step."""
    buffers: dict[tuple[int, int, int], Buffer]
    """By node, operation of its program and tensor that it writes."""
    plan: Plan
    places: tuple[tuple[tuple[Place | None, ...], ...], ...]
    """For each node, operation of its program and tensor that it writes: its place, None for what is not placed."""


def is_placed(tensor: VirtualTensor) -> bool:
    """Whether the plan has a place for a tensor that an operation writes: it does not cross a border of its program."""
    return tensor.role == "temporary"


def signature(program: Program) -> tuple:
    """What programs of one layer have in common whatever their shapes: operations, and which tensors are placed."""
    return program.forward_length, *(
        (operation.name, tuple(map(is_placed, program.written(index))))
        for index, operation in enumerate(program.operations)
    )


def operations_of(one: Pass) -> range:
    """The operations of a pass, in the count of its program."""
    length = one.program.forward_length
    return range(length, len(one.program.operations)) if one.backward else range(length)


def buffers_of(passes: Sequence[Pass], names: Sequence[str], *, margin: int = 0) -> dict[tuple[int, int, int], Buffer]:
    """(node, operation, number of the tensor that it writes) -> buffer, for everything that is placed.

    Args:
        passes: of the step.
        names: of the nodes.
        margin: bytes that every buffer is longer than its tensor.
    """
    starts = _starts(passes)
    begins = {(one.node, one.backward): start for one, start in zip(passes, starts, strict=True)}
    end = starts[-1] + len(operations_of(passes[-1]))

    def moment(node: int, program: Program, operation: int) -> int:
        backward = operation >= program.forward_length
        begin = begins.get((node, backward), end)  # a backward pass that never came keeps its tensors to the end
        return min(begin + operation - (program.forward_length if backward else 0), end)

    found = {}
    for one in passes:
        for index in operations_of(one):
            for number, tensor in enumerate(one.program.written(index)):
                if is_placed(tensor):
                    first, last = one.program.lifetimes[tensor]
                    found[one.node, index, number] = Buffer(
                        name=f"{names[one.node]}/{tensor.name}",
                        size=tensor.size + margin,
                        first=moment(one.node, one.program, first),
                        last=moment(one.node, one.program, last),
                    )
    return found


def _starts(passes: Sequence[Pass]) -> tuple[int, ...]:
    starts, position = [], 0
    for one in passes:
        starts.append(position)
        position += len(operations_of(one))
    return tuple(starts)


@lru_cache(maxsize=8)
def plan_step(passes: tuple[Pass, ...], names: tuple[str, ...], *, margin: int) -> StepPlan:
    """Place the tensors of a step; the same step is planned once.

    Args:
        passes: as a rehearsal noted them; programs are those of the largest batch.
        names: of the nodes, all different.
        margin: bytes kept free behind every tensor.
    """
    buffers = buffers_of(passes, names, margin=margin)
    made = plan(list(buffers.values()))
    programs = {one.node: one.program for one in passes}

    def place(node: int, index: int, number: int) -> Place | None:
        buffer = buffers.get((node, index, number))
        return buffer and (made.segments[buffer.name], made.offsets[buffer.name], buffer.size - margin)

    return StepPlan(
        passes=passes,
        starts=_starts(passes),
        buffers=buffers,
        plan=made,
        places=tuple(
            tuple(
                tuple(place(node, index, number) for number in range(len(programs[node].written(index))))
                for index in range(len(programs[node].operations))
            )
            for node in range(len(names))
        ),
    )


def node_names(owners: Sequence[object], modules: dict[object, str]) -> tuple[str, ...]:
    """A name for every node: its module's, with a number from the second run on."""
    runs: dict[str, int] = {}
    names = []
    for owner in owners:
        name = modules[owner] or type(owner).__name__
        runs[name] = runs.get(name, 0) + 1
        names.append(name if runs[name] == 1 else f"{name}#{runs[name]}")
    return tuple(names)
