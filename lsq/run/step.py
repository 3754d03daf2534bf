"""A training step as one sequence of operations: its rehearsal, and an offset for every tensor.

In a rehearsal programs note that they were called and compute nothing; everything around them is
real. So the order is right for any model, however its layers are shared, repeated or connected.

A tensor that a forward pass saves lives until its last reader in the backward pass of the same
node. Other tensors live inside their pass. Three kinds that cross a program's border have offsets
as well: results that go straight into other programs, their gradients, and gradients of the leaves
of autograd's graph. They are borrowed (lsq.run.planned). PyTorch's allocator holds the rest.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lsq.memory.buffers import Buffer, Plan
from lsq.memory.planner import plan
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.frames import active_rehearsal


@dataclass(frozen=True, kw_only=True)
class Pass:
    node: int
    """Number of the program's run in the step; its forward and backward pass share it."""
    program: Program
    backward: bool
    reads: tuple[int | None, ...]
    """Numbers of its inputs and parameters; None for a tensor that is neither the result of another
    program nor a leaf that needs a gradient."""
    makes: tuple[int, ...]
    """Numbers of its results."""

    @property
    def operations(self) -> range:
        program = self.program
        return program.backward_range if self.backward else range(program.forward_length)


class Rehearsal:
    """The record of a rehearsed step: the passes of all programs that have a backward pass, in
    order; the module that ran each node; and all programs that ran."""

    def __init__(self):
        self.programs: list[Program] = []
        self.passes: list[Pass] = []
        self.owners: list[object] = []
        self._numbers: dict[int, int] = {}
        self._made: list[torch.Tensor] = []
        """All tensors that have a number; kept alive, since numbers are found by ids."""
        self._count = itertools.count()

    def run(
        self, owner: object, program: Program, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Note a run of `program` by `owner`; return zeros that take no memory."""
        self.programs.append(program)
        device = next(iter(tensors.values())).device
        if not program.output_gradients:
            return _zeros(program.outputs, device)
        given = [tensors.get(tensor.name) for tensor in (*program.inputs, *program.parameters)]
        makes = tuple(next(self._count) for _ in program.outputs)
        forward = Pass(
            node=len(self.owners),
            program=program,
            backward=False,
            reads=tuple(map(self._number, given)),
            makes=makes,
        )
        self.owners.append(owner)
        results = _Noted.apply(self.passes, forward, device, *given)
        self._numbers.update(zip(map(id, results), makes, strict=True))
        self._made += results
        return results

    def _number(self, tensor: torch.Tensor | None) -> int | None:
        if (
            tensor is not None
            and id(tensor) not in self._numbers
            and tensor.is_leaf
            and tensor.requires_grad
        ):
            self._numbers[id(tensor)] = next(self._count)
            self._made.append(tensor)
        return self._numbers.get(id(tensor))


class _Noted(torch.autograd.Function):
    """A run of a program in autograd's graph that only notes its passes."""

    @staticmethod
    def forward(ctx, passes: list[Pass], forward: Pass, device: torch.device, *arguments):
        ctx.passes, ctx.noted, ctx.device = passes, forward, device
        passes.append(forward)
        return _zeros(forward.program.outputs, device)

    @staticmethod
    def backward(ctx, *gradients):
        program = ctx.noted.program
        ctx.passes.append(replace(ctx.noted, backward=True))
        results = dict(zip(program.differentiable, program.gradients, strict=True))
        wanted = (results.get(tensor) for tensor in (*program.inputs, *program.parameters))
        made = (None if one is None else _zeros([one], ctx.device)[0] for one in wanted)
        return None, None, None, *made


def _zeros(tensors, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        for tensor in tensors
    )


@contextmanager
def rehearsing() -> Iterator[Rehearsal]:
    """Let modules note their programs instead of running them, within this context."""
    rehearsal = Rehearsal()
    token = active_rehearsal.set(rehearsal)
    try:
        yield rehearsal
    finally:
        active_rehearsal.reset(token)


def rehearse(step: Callable[[], torch.Tensor], parameters) -> Rehearsal:
    """Rehearse `step`, which returns a loss, and its backward pass.

    Gradients and torch's random numbers stay as they were. Raises ValueError: `step` returns no
    scalar, runs the backward pass itself, or its loss depends on no trained layer of lsq.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [parameter.grad for parameter in wanted]
    gpus = {parameter.device for parameter in wanted if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(gpus), rehearsing() as rehearsal, torch.enable_grad():
            loss = step()
            _check_step(loss, rehearsal)
            torch.autograd.grad(loss, wanted, allow_unused=True)
    finally:
        for parameter, gradient in zip(wanted, gradients, strict=True):
            parameter.grad = gradient
    return rehearsal


def _check_step(loss: object, rehearsal: Rehearsal) -> None:
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"the step returned '{type(loss).__name__}'; it must return the loss, a scalar tensor"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the step returned a tensor {tuple(loss.shape)}; it must return the loss, a scalar"
            " tensor"
        )
    if any(one.backward for one in rehearsal.passes):
        raise ValueError(
            "the step went back by itself; it must return the loss, and leave backward() out"
        )
    if not rehearsal.passes or not loss.requires_grad:
        raise ValueError(
            "the step ran no layer of lsq that is trained; run the model on a batch, with"
            " parameters that require grad"
        )


@contextmanager
def counting_kept(model: nn.Module, kept: Counter) -> Iterator[None]:
    """Count the bytes that modules of other packages keep for the backward pass in a rehearsal:
    `kept` gets them by class of the innermost module. Storages count once, parameters not at
    all."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    inside: list[str] = []
    held = []  # else a new storage could have the address of a freed one

    def enter(module: nn.Module, inputs: tuple) -> None:
        inside.append(type(module).__name__)

    def leave(module: nn.Module, inputs: tuple, outputs: object) -> None:
        inside.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            held.append(tensor)
            # tensors of a rehearsal have one value in memory
            whole = tensor.numel() * tensor.element_size()
            kept[inside[-1] if inside else "the loss"] += max(storage.nbytes(), whole)
        return tensor

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


Key = tuple[int, int, int]
"""(node, index of the operation in its program, number of the tensor that it writes)."""


@dataclass(frozen=True, kw_only=True)
class Borrow:
    """How a tensor that crosses a border of its program is borrowed from the arena."""

    until: int
    """Position of the last pass that needs it."""
    keep: bool = False
    """Whether it is held until then: it is added to an earlier contribution, and autograd must not
    make it the `grad` itself."""
    leaf: VirtualTensor | None = None
    """The leaf of autograd's graph whose first gradient it is: it may become the `grad`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    passes: tuple[Pass, ...]
    starts: tuple[int, ...]
    """Index of each pass's first operation, counted over the whole step."""
    buffers: dict[Key, Buffer]
    borrowed: dict[Key, Borrow]
    plan: Plan
    offsets: dict[Key, int]


def signature(program: Program) -> tuple:
    """Return what all programs of one layer share: operations, and which tensors are temporary."""
    return program.forward_length, *(
        (operation.name, tuple(tensor.is_temporary for tensor in program.written(index)))
        for index, operation in enumerate(program.operations)
    )


def borrowed_in(passes: Sequence[Pass]) -> dict[Key, Borrow]:
    """Find the borrowed tensors: results that other programs read, and gradients of these and of
    leaves."""
    last_read = _last_reads(passes)
    backward = {one.node: position for position, one in enumerate(passes) if one.backward}
    gone_back = {number: backward.get(one.node, 0) for one in passes for number in one.makes}
    end = len(passes) - 1
    borrowed: dict[Key, Borrow] = {}
    firsts: dict[int, Key] = {}
    for position, one in enumerate(passes):
        for key, border, source in crossing(one):
            if not one.backward:
                if source in last_read:
                    borrowed[key] = Borrow(until=last_read[source])
                continue
            first = firsts.setdefault(source, key)
            leaf = border if first == key and source not in gone_back else None
            borrowed[key] = Borrow(until=position, keep=first != key, leaf=leaf)
            until = max(position, gone_back.get(source, end))
            borrowed[first] = replace(borrowed[first], until=until)
    return borrowed


def crossing(one: Pass) -> Iterator[tuple[Key, VirtualTensor, int]]:
    """Yield (key, border, number of the tensor at that border) for each tensor that a pass hands
    on. Backward, the tensor handed on is the gradient of the border."""
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
        borders = zip(program.outputs, one.makes, strict=True)
        known = {border: (border, source) for border, source in borders}
    for index in one.operations:
        for number, tensor in enumerate(program.outputs_of[index]):
            if tensor in known:
                yield (one.node, index, number), *known[tensor]


def _last_reads(passes: Sequence[Pass]) -> dict[int, int]:
    """Return result -> last forward pass that reads it, for results that no backward pass reads."""
    last: dict[int, int] = {}
    needed = set()
    for position, one in enumerate(passes):
        if not one.backward:
            program = one.program
            borders = (*program.inputs, *program.parameters, *program.outputs)
            for border, source in zip(borders, (*one.reads, *one.makes), strict=True):
                if program.lifetimes[border][1] >= program.forward_length:
                    needed.add(source)
                elif border not in program.outputs:
                    last[source] = position
    return {source: position for source, position in last.items() if source not in needed}


def buffers_of(
    passes: Sequence[Pass], names: Sequence[str], *, margin: int = 0
) -> dict[Key, Buffer]:
    """Make the buffers of all tensors with offsets, each `margin` bytes longer than its tensor."""
    *starts, end = _starts(passes)
    begins = {(one.node, one.backward): start for one, start in zip(passes, starts, strict=True)}
    borrowed = borrowed_in(passes)

    def moment(node: int, program: Program, operation: int) -> int:
        backward = operation >= program.forward_length
        # if there is no backward pass, saved tensors live to the end
        begin = begins.get((node, backward), end)
        return min(begin + operation - (program.forward_length if backward else 0), end)

    buffers = {}
    for one in passes:
        for index in one.operations:
            for number, tensor in enumerate(one.program.written(index)):
                key = one.node, index, number
                if not tensor.is_temporary and key not in borrowed:
                    continue
                life = one.program.lifetimes[tensor]
                first, last = (moment(one.node, one.program, time) for time in life)
                if key in borrowed:
                    until = borrowed[key].until
                    last = starts[until] + len(passes[until].operations) - 1
                buffers[key] = Buffer(
                    name=f"{names[one.node]}/{tensor.name}",
                    size=tensor.size + margin,
                    first=first,
                    last=last,
                )
    return buffers


def _starts(passes: Sequence[Pass]) -> tuple[int, ...]:
    """Return the first operation of each pass, counted over the step, and the step's length."""
    return tuple(itertools.accumulate((len(one.operations) for one in passes), initial=0))


@lru_cache(maxsize=8)
def plan_step(passes: tuple[Pass, ...], names: tuple[str, ...], *, margin: int) -> StepPlan:
    """Choose the offsets of a step whose `passes` were rehearsed with the largest batch
    (cached)."""
    buffers = buffers_of(passes, names, margin=margin)
    made = plan(buffers.values(), method="training")
    return StepPlan(
        passes=passes,
        starts=_starts(passes)[:-1],
        buffers=buffers,
        borrowed=borrowed_in(passes),
        plan=made,
        offsets={key: made.offsets[buffer.name] for key, buffer in buffers.items()},
    )


def node_names(owners: Sequence[object], modules: dict[object, str]) -> tuple[str, ...]:
    """Name every node by its module, with a number from the module's second run on."""
    runs: Counter[str] = Counter()
    names = []
    for owner in owners:
        name = modules[owner] or type(owner).__name__
        runs[name] += 1
        names.append(name if runs[name] == 1 else f"{name}#{runs[name]}")
    return tuple(names)
