"""Planned memory of a training step: every tensor at the offset of a plan, in one arena.

User code may keep tensors that cross a border of a program: results that other programs read, their
gradients, and gradients of the leaves of autograd's graph. These are *borrowed* from the arena. If
one is still held when its bytes are needed again (no zero_grad, a list of states, hooks), it is
copied out first and stays valid.
"""

import math
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

import torch

from lsq.memory.kept import Arena, copied_out_before_forks
from lsq.program.backend import Backend
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.frames import Frame, PreparedPass, Values, fresh
from lsq.run.step import Borrow, StepPlan, signature

UNPLANNED = (
    "train without a plan (release_memory; LsqCallback without largest_batch; in fairseq"
    " --lsq-memory naive)"
)
ADVICE = f"rehearse the step as it is now (lsq.layers.memory.plan_memory), or {UNPLANNED}"
CLASSES = 5
PREPARED_KEPT = 2048
"""Most prepared passes of a memory, of about 30 KB each; the least recently used is dropped."""


class BorrowedTensor:
    """A tensor of the arena that user code may hold, with its own storage.

    `memory`: a reference that dies with that storage. `borrow`: until when, and whether to hold it
    until then, so that autograd never makes it the `grad` itself. A tensor that contributions are
    added to in place must not be held. `leaf`: the leaf whose `grad` it may become. `label`: for
    messages.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        memory: weakref.ref,
        borrow: Borrow,
        leaf: weakref.ref | None,
        label: str,
    ):
        self.until, self.label = borrow.until, label
        self._held = tensor if borrow.keep else None
        self._tensor, self._memory = weakref.ref(tensor), memory
        self.leaf, self._address = leaf, tensor.data_ptr()

    def find_gradient(self) -> None:
        """Follow the leaf's `grad` if it lies here: autograd may have made it a new tensor."""
        leaf = self.leaf and self.leaf()
        gradient = None if leaf is None or self._memory() is None else leaf.grad
        if (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.data_ptr() == self._address
        ):
            self._tensor = weakref.ref(gradient)

    def copy_out(self) -> bool:
        """Move the tensor to its own memory if anybody holds it. Return whether its old bytes are
        free; a view that somebody holds keeps them."""
        self._held = None
        self.find_gradient()
        if self._memory() is not None and (tensor := self._tensor()) is not None:
            tensor.data = tensor.data.clone()
        return self._memory() is None


class PlannedFrame(Frame):
    """Tensors at the offsets of a plan. A tensor that crosses a border is borrowed, or has fresh
    memory.

    `node`: which run of the step it is. `leaves`: the leaves of autograd's graph that the program
    reads, by name. A gradient that was planned as the first of a leaf is borrowed only if the leaf
    is among them. `repeated`: whether the program has run at this node before.
    """

    def __init__(
        self,
        memory: "StepMemory",
        node: int,
        *,
        leaves: Mapping[str, weakref.ref],
        repeated: bool,
    ):
        super().__init__()
        self.memory, self.node = memory, node
        self._leaves, self._repeated = leaves, repeated
        self.step_number: int | None = None

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
                if not tensor.is_temporary:
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
        return {
            tensor: self._tensor(tensor, index, number)
            for index in range(len(program.operations))
            for number, tensor in enumerate(program.written(index))
            if tensor.is_temporary
        }

    def _tensor(self, tensor: VirtualTensor, index: int, number: int) -> torch.Tensor:
        view = self.bucket_views.pop(tensor, None)
        if view is not None:
            return view
        offset = self.offset(index, number)
        if offset is None or not tensor.size:
            return fresh(tensor.shape, tensor.dtype, self.memory.arena.device)
        if tensor.is_temporary:
            return self.memory.arena.tensor(offset, tensor.shape, tensor.dtype)
        borrow = self.memory.step.borrowed[self.node, index, number]
        leaf = borrow.leaf and self._leaves[borrow.leaf.name]
        label = f"{tensor.name} of {self.memory.names[self.node]}"
        return self.memory.borrow(offset, tensor, borrow, leaf, label)

    def offset(self, index: int, number: int) -> int | None:
        """Return the offset of tensor `number` of operation `index`; None: fresh memory."""
        key = self.node, index, number
        borrow = self.memory.step.borrowed.get(key)
        if borrow is not None and borrow.leaf is not None and borrow.leaf.name not in self._leaves:
            return None
        return self.memory.step.offsets.get(key)

    def enter(self, backward: bool) -> None:
        self.memory.enter(self, backward)

    def leave(self) -> None:
        self.memory.leave()


class StepMemory:
    """The arena of one model's training step, and the order in which it is used.

    Passes must come in the planned order; some may be left out. A forward pass out of order begins
    the next step. Then the tensors saved in the old step are gone, and its backward passes are
    refused. `owners`: the module of each node. `outside`: bytes that other modules keep for the
    backward pass, by class.
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
        self._open: list[BorrowedTensor] = []
        copied_out_before_forks(self)
        self._owners = [weakref.ref(owner) for owner in owners]
        self.positions = {
            (each.node, each.backward): position for position, each in enumerate(step.passes)
        }
        self._programs = {one.node: one.program for one in step.passes}
        self._fitting: dict[int, weakref.WeakSet[Program]] = {
            node: weakref.WeakSet() for node in self._programs
        }
        self.prepared: OrderedDict[tuple, PreparedPass] = OrderedDict()
        """Prepared passes by program, node, operations and backend. A program is prepared when it
        runs at a node again: shapes that come once are not worth it."""
        self._busy = threading.Lock()
        self._step_number = 0
        self._position = -1

    def __str__(self) -> str:
        plan = self.step.plan
        return (
            f"{len(plan.offsets)} tensors of lsq's layers in {self.arena.size / 2**20:.1f} MiB,"
            f" {plan.gap:.2%} above the lower bound; outside of it {described(self.outside)}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __deepcopy__(self, memo):
        return None  # the steps of a copied model are not planned yet

    def __reduce__(self):
        return type(None), ()

    def open(
        self,
        owner: object,
        program: Program,
        tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """Return the frame for the next run of `program` by `owner` on `tensors`. Raises
        RuntimeError: the plan has no such run; ValueError: the batch is larger than planned."""
        nodes = [node for node, known in enumerate(self._owners) if known() is owner]
        if not nodes:
            raise RuntimeError(
                f"{program.name} is run by a module that was not part of the planned step; {ADVICE}"
            )
        node = next(
            (node for node in nodes if self.positions[node, False] > self._position), nodes[0]
        )
        repeated = program in self._fitting[node]
        if not repeated:
            self._check(node, program)
        leaves = {
            name: weakref.ref(tensor)
            for name, tensor in tensors.items()
            if tensor.is_leaf and tensor.requires_grad
        }
        return self.frame(self, node, leaves=leaves, repeated=repeated)

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
                        f" {tensor.size} bytes for {tensor!r}; planned were {bound.size} bytes for"
                        f" {bound!r}. Plan for larger batches (plan_memory; largest_batch of"
                        " LsqCallback; in fairseq --max-tokens, --batch-size,"
                        " --max-source-positions, --max-target-positions), or make smaller ones"
                    )
        self._fitting[node].add(program)

    def enter(self, frame: PlannedFrame, backward: bool) -> None:
        """Begin a pass of `frame`; `leave` ends it. Raises RuntimeError: another pass is running,
        this pass is out of order, or user code still holds a view of a borrowed tensor."""
        name = self.names[frame.node]
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{name} runs while another pass in the same planned memory is running; {ADVICE}"
            )
        try:
            if backward:
                self._begin_backward(frame, name)
            else:
                position = self.positions[frame.node, False]
                if position <= self._position:
                    self.next_step()
                self.end_borrowed(position)
                self._position, frame.step_number = position, self._step_number
        except BaseException:
            self._busy.release()
            raise

    def leave(self) -> None:
        self._busy.release()

    def next_step(self) -> None:
        self.end_borrowed(math.inf)
        self._step_number += 1

    def borrow(self, offset: int, virtual: VirtualTensor, *options) -> torch.Tensor:
        """Return a tensor at byte `offset` for user code. `options`: as for BorrowedTensor."""
        tensor, memory = self.arena.lend(offset, virtual.shape, virtual.dtype)
        borrowed = BorrowedTensor(tensor, memory, *options)
        self._open.append(borrowed)
        # at the end of backward(): until then hooks may replace the gradient
        if borrowed.leaf is not None:
            torch.autograd.Variable._execution_engine.queue_callback(borrowed.find_gradient)
        return tensor

    def copy_out(self, position: float = math.inf) -> None:
        """Copy out held tensors that were borrowed until a pass before `position`; views stay."""
        self._open = [one for one in self._open if one.until >= position or not one.copy_out()]

    def end_borrowed(self, position: float) -> None:
        """Free the bytes of tensors that were borrowed until a pass before `position`. Raises
        RuntimeError: user code holds a view of one."""
        self.copy_out(position)
        held = next((one for one in self._open if one.until < position), None)
        if held is not None:
            raise RuntimeError(
                f"{held.label} lies in planned memory that is needed again, and something still"
                " holds a view of it; clone the views of results and gradients that you keep, or"
                f" {UNPLANNED}"
            )

    def _begin_backward(self, frame: PlannedFrame, name: str) -> None:
        if frame.step_number != self._step_number:
            raise RuntimeError(
                f"what {name} has saved for its backward pass is gone: its model has begun another"
                f" step since; {ADVICE}"
            )
        position = self.positions.get((frame.node, True), -1)
        if position <= self._position:
            raise RuntimeError(
                f"the backward pass of {name} has begun before, or comes out of the planned order;"
                f" {ADVICE}"
            )
        self.end_borrowed(position)
        self._position = position


def described(outside: Mapping[str, int]) -> str:
    """Describe the bytes that other modules keep, by class."""
    if not outside:
        return "nothing is kept"
    largest = Counter(outside).most_common(CLASSES)
    parts = [f"{name} {size / 2**20:.1f}" for name, size in largest]
    if len(outside) > CLASSES:
        parts.append(f"{len(outside) - CLASSES} others")
    total = sum(outside.values()) / 2**20
    return f"{total:.1f} MiB are kept by modules that are not lsq's ({', '.join(parts)})"
