"""Where the tensors of a running program come from: the places of a step's plan, or fresh memory
(fresh.py).

A *frame* is the memory of one run of a program, forward and backward. It hands out the tensors that
operations write.
"""

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from lsq.memory import kept
from lsq.memory.arena import Arena
from lsq.program.backend import Backend
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.loans import Loans
from lsq.run.outside import described
from lsq.run.prepared import PreparedPass
from lsq.run.step import StepPlan, is_placed, signature

ADVICE = (
    "rehearse the step as it is now (lsq.layers.memory.plan_memory), or train without a plan"
    " (release_memory; "
    "LsqCallback without largest_batch; in fairseq --lsq-memory naive)"
)


Values = dict[VirtualTensor, torch.Tensor]
PREPARED_KEPT = 2048
"""Prepared passes that a memory keeps, those used last; one takes about 30 KB."""


def fresh(tensor: VirtualTensor, device: torch.device) -> torch.Tensor:
    """Memory of its own for a virtual tensor."""
    if device.type == "cpu":
        return kept.tensor(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class Frame:
    """The memory of one run of a program."""

    def __init__(self):
        self.homes: Values = {}
        """Where gradients of this pass belong that have memory already; see lsq.run.homes."""

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        """Tensors for operation `index` to write into: its outputs, then its scratch memory."""
        raise NotImplementedError

    def done(self, program: Program, index: int) -> None:
        """Operation `index` has run."""

    def run_prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> bool:
        """Run a whole pass at once on `values`, which gains what it writes across borders; False:
        it cannot be."""
        return False

    def kept(self, program: Program) -> Values:
        """What lies where the forward pass has left it, for a backward pass; the rest comes through
        autograd."""
        return {}

    @contextmanager
    def running(self, backward: bool) -> Iterator[None]:
        """Around each pass."""
        yield


class PlannedFrame(Frame):
    """Tensors at the places of a plan; what crosses a border is lent, or gets fresh memory.

    Args:
        memory: the plan's.
        node: which run of the step it is.
        program: what runs; it has the operations of the planned program, and no larger tensors.
        leaves: references to the leaves of autograd's graph that the program reads, by name. What
            was planned as the first gradient of a leaf is lent if it is one.
        repeated: whether it has run before.
    """

    def __init__(
        self,
        memory: "StepMemory",
        node: int,
        program: Program,
        *,
        leaves: Mapping[str, weakref.ref],
        repeated: bool,
    ):
        super().__init__()
        self.memory, self.node = memory, node
        self._leaves, self._repeated = leaves, repeated
        self.step_number: int | None = None
        """Number of the step in which the forward pass ran."""

    def tensors_for(self, program: Program, index: int) -> list[torch.Tensor]:
        return [
            self._tensor(tensor, index, number)
            for number, tensor in enumerate(program.written(index))
        ]

    def run_prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> bool:
        if not (self._repeated and backend.refillable):
            return False
        for index in indices:
            for number, tensor in enumerate(program.outputs_of[index]):
                if not is_placed(tensor):
                    values[tensor] = self._tensor(tensor, index, number)
        self._prepared(program, indices, backend, values).run(values)
        return True

    def _prepared(
        self, program: Program, indices: range, backend: Backend, values: Values
    ) -> PreparedPass:
        kept, key = self.memory.prepared, (program, self.node, indices, backend)
        if key not in kept:
            inside = self._inside(program)
            kept[key] = PreparedPass(program, indices, backend, inside=inside, borders=values)
            if len(kept) > PREPARED_KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def kept(self, program: Program) -> Values:
        return self._inside(program)

    def _inside(self, program: Program) -> Values:
        """Everything that has a place."""
        return {
            tensor: self._tensor(tensor, index, number)
            for index in range(len(program.operations))
            for number, tensor in enumerate(program.written(index))
            if is_placed(tensor)
        }

    def _tensor(self, tensor: VirtualTensor, index: int, number: int) -> torch.Tensor:
        home = self.homes.pop(tensor, None)
        if home is not None:
            return home
        place = self.place(index, number)
        if place is None or not tensor.size:
            return fresh(tensor, self.memory.arena.device)
        if is_placed(tensor):
            return self.memory.arena.tensor(place, tensor.shape, tensor.dtype)
        lending = self.memory.step.lent[self.node, index, number]
        return self.memory.loans.lend(
            place,
            tensor.shape,
            tensor.dtype,
            until=lending.until,
            keep=lending.keep,
            leaf=lending.leaf and self._leaves[lending.leaf.name],
            label=f"{tensor.name} of {self.memory.names[self.node]}",
        )

    def place(self, index: int, number: int) -> int | None:
        """The offset at which tensor `number` of operation `index` lies in this run; None: in fresh
        memory."""
        key = self.node, index, number
        lending = self.memory.step.lent.get(key)
        if (
            lending is not None
            and lending.leaf is not None
            and lending.leaf.name not in self._leaves
        ):
            return None
        return self.memory.step.places.get(key)

    @contextmanager
    def running(self, backward: bool) -> Iterator[None]:
        with self.memory.running(self, backward):
            yield


class StepMemory:
    """The arena of one model's training step, and the order in which it is used.

    Passes must come in the planned order, else tensors would lie where others still live. Some may
    be left out. A forward pass that is out of turn begins the next step; what the step before has
    saved is gone then, and its backward passes are refused. So is a pass that begins while another
    one runs, and a batch larger than planned.

    Args:
        step: the plan.
        owners: the module of each node.
        names: of the nodes, for messages.
        device: where the arena lies.
        outside: bytes that modules of others keep for the backward pass of the step, by class.
    """

    frame = PlannedFrame

    def __init__(
        self,
        step: StepPlan,
        owners: list[object],
        names: tuple[str, ...],
        device: torch.device | str = "cpu",
        *,
        outside: Mapping[str, int] = MappingProxyType({}),
    ):
        self.step = step
        self.names = names
        self.outside = outside
        self.arena = Arena(step.plan.peak, device)
        self.loans = Loans(self.arena)
        self._owners = [weakref.ref(owner) for owner in owners]
        self._positions = {
            (one.node, one.backward): position for position, one in enumerate(step.passes)
        }
        self._programs = {one.node: one.program for one in step.passes}
        self._fitting: dict[int, weakref.WeakSet[Program]] = {
            node: weakref.WeakSet() for node in self._programs
        }
        self.prepared: OrderedDict[tuple, PreparedPass] = OrderedDict()
        """By program, node, operations and backend. Shapes that come once are not prepared."""
        self._busy = threading.Lock()
        self._step_number = 0
        self._position = -1

    def __str__(self) -> str:
        plan = self.step.plan
        return (
            f"{len(plan.offsets)} tensors of lsq's layers in {self.arena.size / 2**20:.1f} MiB,"
            f" {plan.gap:.2%} above "
            f"the lower bound; outside of it {described(self.outside)}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __deepcopy__(self, memo):
        return None  # a copy of a model has its own steps, which nobody has planned yet

    def __reduce__(self):
        return type(None), ()

    def open(
        self,
        owner: object,
        program: Program,
        tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """The PlannedFrame for the next run of `program` by `owner` on `tensors`.

        Raises:
            RuntimeError: the plan has no such run.
            ValueError: the batch is larger than planned.
        """
        nodes = [node for node, known in enumerate(self._owners) if known() is owner]
        if not nodes:
            raise RuntimeError(
                f"{program.name} is run by a module that was not part of the planned step; {ADVICE}"
            )
        node = next(
            (node for node in nodes if self._positions[node, False] > self._position), nodes[0]
        )
        repeated = program in self._fitting[node]
        if not repeated:
            self._check(node, program)
        leaves = {
            name: weakref.ref(tensor)
            for name, tensor in tensors.items()
            if tensor.is_leaf and tensor.requires_grad
        }
        return self.frame(self, node, program, leaves=leaves, repeated=repeated)

    def _check(self, node: int, program: Program) -> None:
        planned = self._programs[node]
        if signature(program) != signature(planned):
            raise RuntimeError(
                f"{self.names[node]} runs other operations than memory was planned for; {ADVICE}"
            )
        for index in range(len(program.operations)):
            for tensor, bound in zip(program.written(index), planned.written(index), strict=True):
                if tensor.size > bound.size:
                    raise ValueError(
                        f"the batch is too large for the planned memory: {self.names[node]} needs"
                        f" {tensor.size} bytes "
                        f"for {tensor!r}; planned were {bound.size} bytes for {bound!r}. Plan for"
                        " larger batches "
                        "(plan_memory; largest_batch of LsqCallback; in fairseq --max-tokens,"
                        " --batch-size, "
                        "--max-source-positions, --max-target-positions), or make smaller ones"
                    )
        self._fitting[node].add(program)

    @contextmanager
    def running(self, frame: PlannedFrame, backward: bool) -> Iterator[None]:
        """Around a pass of `frame`.

        Raises:
            RuntimeError: another pass is running, this one must not run now, or a view of what was
                lent is still held.
        """
        name = self.names[frame.node]
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{name} runs while another pass in the same planned memory is running; {ADVICE}"
            )
        try:
            if backward:
                self._turn_back(frame, name)
            else:
                self._enter(frame)
            yield
        finally:
            self._busy.release()

    def _enter(self, frame: PlannedFrame) -> None:
        position = self._positions[frame.node, False]
        if position <= self._position:
            self.next_step()
        self.end_loans(position)
        self._position, frame.step_number = position, self._step_number

    def next_step(self) -> None:
        """Whatever lies in the arena is not needed any more."""
        self.end_loans(math.inf)
        self._step_number += 1

    def end_loans(self, position: float) -> None:
        """Take back what was lent until a pass before `position`; raises as `Loans.end`."""
        self.loans.end(position)

    def _turn_back(self, frame: PlannedFrame, name: str) -> None:
        if frame.step_number != self._step_number:
            raise RuntimeError(
                f"what {name} has saved for its backward pass is gone: its model has begun another"
                f" step since; {ADVICE}"
            )
        position = self._positions.get((frame.node, True), -1)
        if position <= self._position:
            raise RuntimeError(
                f"the backward pass of {name} has begun before, or comes out of the planned order;"
                f" {ADVICE}"
            )
        self.end_loans(position)
        self._position = position
