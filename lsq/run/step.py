"""A whole training step as one sequence of operations: lifetimes across programs, and a place for
every tensor.

The passes of a rehearsed step follow each other in one count of operations. What a forward pass
saves lives until the backward pass of the same node has read it for the last time; everything else
dies inside its pass, so temporaries of all layers share their bytes. Of what crosses a program's
border, results that go straight into other programs are placed, too, and gradients of those and of
the leaves of autograd's graph: they are borrowed (lsq.run.planned). The rest belongs to others and
stays with PyTorch's allocator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lsq.memory.buffer import Buffer, Plan
from lsq.memory.planner import plan
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.rehearsal import Pass

Key = tuple[int, int, int]
"""Node, operation of its program and tensor that it writes."""


@dataclass(frozen=True, kw_only=True)
class Borrow:
    """When a tensor that crosses a border of its program is borrowed from the arena."""

    until: int
    """Position of the pass after which nobody needs it."""
    keep: bool = False
    """It is added to an earlier contribution, so that autograd must never take it for the whole."""
    leaf: VirtualTensor | None = None
    """The leaf of autograd's graph of which it is the first gradient of the step, and may become
    the `grad`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """The offsets of all tensors of a step."""

    passes: tuple[Pass, ...]
    starts: tuple[int, ...]
    """The first operation of each pass, in the count of the whole step."""
    buffers: dict[Key, Buffer]
    borrowed: dict[Key, Borrow]
    plan: Plan
    offsets: dict[Key, int]
    """In bytes."""


def is_placed(tensor: VirtualTensor) -> bool:
    """Whether a tensor that an operation writes always lies in its place: it does not cross a
    border of its program."""
    return tensor.role == "temporary"


def signature(program: Program) -> tuple:
    """Return what programs of one layer share whatever their shapes: operations, and which tensors
    are placed."""
    return program.forward_length, *(
        (operation.name, tuple(map(is_placed, program.written(index))))
        for index, operation in enumerate(program.operations)
    )


def operations_of(one: Pass) -> range:
    """The operations of a pass, in the count of its program."""
    length = one.program.forward_length
    return range(length, len(one.program.operations)) if one.backward else range(length)


def borrowed_in(passes: Sequence[Pass]) -> dict[Key, Borrow]:
    """Results that other programs read, and gradients of those and of the leaves of autograd's
    graph."""
    last_read = _last_reads(passes)
    backward = {one.node: position for position, one in enumerate(passes) if one.backward}
    gone_back = {number: backward.get(one.node, 0) for one in passes for number in one.makes}
    end = len(passes) - 1
    found: dict[Key, Borrow] = {}
    firsts: dict[int, Key] = {}
    for position, one in enumerate(passes):
        for key, border, source in crossing(one):
            if not one.backward:
                if source in last_read:
                    found[key] = Borrow(until=last_read[source])
                continue
            first = firsts.setdefault(source, key)
            leaf = border if first == key and source not in gone_back else None
            found[key] = Borrow(until=position, keep=first != key, leaf=leaf)
            found[first] = replace(found[first], until=max(position, gone_back.get(source, end)))
    return found


def crossing(one: Pass) -> Iterator[tuple[Key, VirtualTensor, int]]:
    """(key, the border that it is or is the gradient of, number of the tensor there) of what a pass
    hands on."""
    program = one.program
    if one.backward:
        gradients = dict(zip(program.differentiable, program.gradients, strict=True))
        borders = zip((*program.inputs, *program.parameters), one.reads, strict=True)
        known = {
            gradients.get(border): (border, source)
            for border, source in borders
            if source is not None
        }
    else:
        known = {
            border: (border, source)
            for border, source in zip(program.outputs, one.makes, strict=True)
        }
    for index in operations_of(one):
        for number, tensor in enumerate(program.outputs_of[index]):
            if tensor in known:
                yield (one.node, index, number), *known[tensor]


def _last_reads(passes: Sequence[Pass]) -> dict[int, int]:
    """Result -> position of the last forward pass that reads it, where no backward pass needs
    it."""
    found: dict[int, int] = {}
    needed = set()
    for position, one in enumerate(passes):
        if not one.backward:
            program = one.program
            borders = (*program.inputs, *program.parameters, *program.outputs)
            for border, source in zip(borders, (*one.reads, *one.makes), strict=True):
                if program.lifetimes[border][1] >= program.forward_length:
                    needed.add(source)
                elif border not in program.outputs:
                    found[source] = position
    return {source: position for source, position in found.items() if source not in needed}


def buffers_of(
    passes: Sequence[Pass], names: Sequence[str], *, margin: int = 0
) -> dict[Key, Buffer]:
    """The buffer of everything that is placed.

    Args:
        passes: of the step.
        names: of the nodes.
        margin: bytes that every buffer is longer than its tensor.
    """
    starts = _starts(passes)
    begins = {(one.node, one.backward): start for one, start in zip(passes, starts, strict=True)}
    end = starts[-1] + len(operations_of(passes[-1]))
    borrowed = borrowed_in(passes)

    def moment(node: int, program: Program, operation: int) -> int:
        backward = operation >= program.forward_length
        # a backward pass that never came keeps its tensors to the end
        begin = begins.get((node, backward), end)
        return min(begin + operation - (program.forward_length if backward else 0), end)

    found = {}
    for one in passes:
        for index in operations_of(one):
            for number, tensor in enumerate(one.program.written(index)):
                key = one.node, index, number
                if is_placed(tensor) or key in borrowed:
                    first, last = (
                        moment(one.node, one.program, time)
                        for time in one.program.lifetimes[tensor]
                    )
                    if key in borrowed:
                        until = borrowed[key].until
                        last = starts[until] + len(operations_of(passes[until])) - 1
                    found[key] = Buffer(
                        name=f"{names[one.node]}/{tensor.name}",
                        size=tensor.size + margin,
                        first=first,
                        last=last,
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
    made = plan(buffers.values(), method="training")
    return StepPlan(
        passes=passes,
        starts=_starts(passes),
        buffers=buffers,
        borrowed=borrowed_in(passes),
        plan=made,
        offsets={key: made.offsets[buffer.name] for key, buffer in buffers.items()},
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
