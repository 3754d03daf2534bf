"""Runs a program as one node of PyTorch's autograd.

Operations write to tensors of the run's frame: fresh memory, or the offsets of a step's plan. A
pass is prepared once and then runs as a whole. With hooks, under `profile` and on the reference,
operations run one by one: outputs are allocated before their operation and dropped after their last
reader.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lsq.program.backend import Backend
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.frames import Frame, FreshFrame, Values, claim
from lsq.run.shards import copies

if TYPE_CHECKING:
    from lsq.run.planned import StepMemory


@contextmanager
def profile() -> Iterator[dict[str, float]]:
    """Measure the seconds that each operation runs, on any backend, once it is prepared. Yields a
    dict, operation name -> seconds."""
    previous, Backend.seconds = Backend.seconds, defaultdict(float)
    try:
        yield Backend.seconds
    finally:
        Backend.seconds = previous


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that are called around each operation of a forward pass, with the operation as the
    program declares it and the operation on real tensors."""

    before: Callable[[Operation, Operation], None] | None = None
    after: Callable[[Operation, Operation], None] | None = None


NO_HOOKS = Hooks()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes that are converted at the borders of a program."""


class Execution:
    """A program that runs on the tensors of a call: `Execution(program, backend)(tensors by name)`.

    `hooks`: called around each operation of the forward pass. `memory`: planned memory for runs
    with a backward pass; None: fresh memory. `owner`: the module that runs the program, by which
    `memory` finds its place in the step. `fleeting`: names of parameters whose values may change
    before the backward pass, which gets copies.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        *,
        hooks: Hooks = NO_HOOKS,
        memory: "StepMemory | None" = None,
        owner: object = None,
        fleeting: Collection[str] = (),
    ):
        self.program, self.backend, self.hooks = program, backend, hooks
        self.memory, self.owner, self.fleeting = memory, owner, fleeting

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run forward and return the outputs in the program's dtypes; inputs may have any dtype of
        FLOATS. If the program has a backward pass, gradients flow to inputs and parameters. Raises
        ValueError: a tensor is missing, or has another shape or dtype than the program."""
        program, borders = self.program, {}
        for virtual in (*program.inputs, *program.parameters):
            tensor = borders[virtual] = tensors.get(virtual.name)
            if tensor is None or tensor.dtype is not virtual.dtype or tensor.shape != virtual.shape:
                _check(virtual, tensor, program)
        if program.output_gradients:
            if self.memory is None:
                frame = FreshFrame(self.backend.device)
            else:
                frame = self.memory.open(self.owner, program, tensors)
            graph = [virtual for virtual, tensor in borders.items() if tensor.requires_grad]
            run = self, frame, borders, graph
            return _Node.apply(run, *[borders[virtual] for virtual in graph])
        with torch.no_grad():
            values = _as_read(borders)
            self.run_pass(range(program.forward_length), values, FreshFrame(self.backend.device))
            return tuple([values[output] for output in program.outputs])

    def run_pass(self, indices: range, values: Values, frame: Frame) -> None:
        """Run a whole pass, the operations `indices`, and add its results to `values`."""
        hooks = NO_HOOKS if indices.start else self.hooks
        looked_at = self.backend.seconds is not None or hooks is not NO_HOOKS
        if looked_at or not frame.run_prepared(self.program, indices, self.backend, values):
            if indices.start:
                values.update({**frame.kept(self.program), **values})
            self.run(indices, values, frame, hooks)

    def run(self, indices: range, values: Values, frame: Frame, hooks: Hooks = NO_HOOKS) -> None:
        """Run `indices` one by one. `values` gains outputs, and loses tensors after their last
        reader."""
        program = self.program
        for index in indices:
            operation = program.operations[index]
            written = frame.tensors_for(program, index)
            outputs = program.outputs_of[index]
            values.update(zip(outputs, written, strict=False))
            bound = operation.bind(values.__getitem__)
            if hooks.before:
                hooks.before(operation, bound)
            run = self.backend.prepare([(bound, written[len(outputs) :])])
            began = time.perf_counter()
            run()
            if self.backend.seconds is not None:
                self.backend.seconds[operation.name] += time.perf_counter() - began
            if hooks.after:
                hooks.after(operation, bound)
            frame.done(program, index)
            for tensor in program.dying[index]:
                values.pop(tensor, None)


def _check(virtual: VirtualTensor, tensor: torch.Tensor | None, program: Program) -> None:
    if tensor is None:
        raise ValueError(f"program {program.name} needs a tensor called {virtual.name!r}")
    fits = tensor.dtype == virtual.dtype or (
        virtual.dtype.is_floating_point and tensor.dtype in FLOATS
    )
    if tuple(tensor.shape) != virtual.shape or not fits:
        raise ValueError(
            f"{virtual.name} is {tensor.dtype} {tuple(tensor.shape)}; program {program.name} was"
            f" built for {virtual.dtype} {virtual.shape}"
        )


def _as_read(borders: Mapping[VirtualTensor, torch.Tensor]) -> Values:
    values = {}
    for virtual, tensor in borders.items():
        if tensor.dtype is not virtual.dtype and tensor.dtype in FLOATS:
            tensor = tensor.to(virtual.dtype)
        values[virtual] = tensor.contiguous()  # a weight that is stored as codes alone decodes here
    return values


SECOND = (
    "layers of lsq round, and have no second derivatives (gradient penalties, Hessians), for which"
    " create_graph=True asks: leave the layers that need them as they are by skip= of lsq.convert,"
    " or go back by lsq.revert(model)"
)


def once_differentiable(backward: Callable) -> Callable:
    """Wrap a backward function so that it refuses create_graph=True. Otherwise autograd would take
    its gradients for constants, and a Hessian would be zero without an error."""

    @functools.wraps(backward)
    def once(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(SECOND)
        return backward(ctx, *gradients)

    return once


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: tuple, *_):
        execution, frame, borders, graph = run
        program, length = execution.program, execution.program.forward_length
        values = _as_read(borders)
        frame.enter(backward=False)
        try:
            execution.run_pass(range(length), values, frame)
        finally:
            frame.leave()
        saved = [virtual for virtual in values if program.lifetimes[virtual][1] >= length]
        ctx.execution, ctx.frame, ctx.graph, ctx.saved = execution, frame, graph, saved
        values = {**values, **borders}  # inputs and parameters themselves, not converted copies
        fleeting = [one for one in saved if one.name in execution.fleeting and one in borders]
        if fleeting:
            copied = copies([values[virtual].detach() for virtual in fleeting])
            values.update(zip(fleeting, copied, strict=True))
        ctx.save_for_backward(*[values[virtual] for virtual in saved])
        return tuple([values[output] for output in program.outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        program, frame = ctx.execution.program, ctx.frame
        values = _as_read(dict(zip(ctx.saved, ctx.saved_tensors, strict=True)))
        values |= _as_read(dict(zip(program.output_gradients, gradients, strict=True)))
        results = dict(zip(program.differentiable, program.gradients, strict=True))
        wanted = [results.get(virtual) for virtual in ctx.graph]
        frame.bucket_views = claim(wanted, ctx.next_functions)
        frame.enter(backward=True)
        try:
            ctx.execution.run_pass(program.backward_range, values, frame)
        finally:
            frame.leave()
        return None, *[None if gradient is None else values[gradient] for gradient in wanted]
