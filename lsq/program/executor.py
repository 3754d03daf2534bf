"""Runs a program op by op, and hangs it into PyTorch's autograd as one node.

The outputs of an operation are allocated when it runs and dropped after their last reader. They come from the run's
frame: fresh memory, or the places that a plan of the whole step has for them.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from lsq.ops.registry import fused_available
from lsq.program.frames import Frame, FreshFrame, StepMemory
from lsq.program.program import Program
from lsq.program.tensor import Operation, VirtualTensor

BACKENDS = ("cpu", "reference")
_backend: str | None = None
_seconds: defaultdict[str, float] | None = None


@contextmanager
def backend(name: str):
    """Run every program inside with the operations' "cpu" implementations or with their references.

    Raises:
        ValueError: an unknown name.
    """
    global _backend
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(BACKENDS)}")
    previous, _backend = _backend, name
    try:
        yield
    finally:
        _backend = previous


@contextmanager
def profile():
    """Collect the seconds that each operation takes: yields a dict of operation name -> seconds."""
    global _seconds
    previous, _seconds = _seconds, defaultdict(float)
    try:
        yield _seconds
    finally:
        _seconds = previous


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a module wants to see of its forward pass; both get the operation and the tensors alive."""

    before: Callable[[Operation, dict], None] | None = None
    after: Callable[[Operation, dict], None] | None = None


class Execution:
    """A program with the tensors of one call: `Execution(program, hooks)(tensors by name) -> outputs`.

    Args:
        program: what to run.
        hooks: called around each operation of the forward pass.
        memory: planned memory for runs with a backward pass; without, all tensors get fresh memory.
        owner: who runs, for the memory.
    """

    def __init__(
        self, program: Program, hooks: Hooks | None = None, *, memory: StepMemory | None = None, owner: object = None
    ):
        self.program = program
        self.hooks = hooks or Hooks()
        self.memory = memory
        self.owner = owner

    def __call__(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run forward. Gradients flow to the inputs and parameters of a program that has a backward pass.

        Raises:
            ValueError: a tensor is missing, or its shape or dtype is not the program's.
        """
        program = self.program
        arguments = []
        for virtual in (*program.inputs, *program.parameters):
            tensor = tensors.get(virtual.name)
            if tensor is None:
                raise ValueError(f"program {program.name} needs a tensor called {virtual.name!r}")
            if tuple(tensor.shape) != virtual.shape or tensor.dtype != virtual.dtype:
                raise ValueError(
                    f"{virtual.name} is {tensor.dtype} {tuple(tensor.shape)}; program {program.name} was built for "
                    f"{virtual.dtype} {virtual.shape}"
                )
            arguments.append(tensor)
        if program.output_gradients:
            frame = FreshFrame() if self.memory is None else self.memory.open(self.owner, program)
            return _Node.apply(program, self.hooks, frame, *arguments)
        with torch.no_grad():
            values = dict(zip((*program.inputs, *program.parameters), map(_contiguous, arguments), strict=True))
            run(program, 0, program.forward_length, values, self.hooks, FreshFrame())
            return tuple(values[output] for output in program.outputs)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


class _Node(torch.autograd.Function):
    """One program as one node of the autograd graph."""

    @staticmethod
    def forward(ctx, program: Program, hooks: Hooks, frame: Frame, *arguments):
        borders = (*program.inputs, *program.parameters)
        values = dict(zip(borders, map(_contiguous, arguments), strict=True))
        with frame.running(backward=False):
            run(program, 0, program.forward_length, values, hooks, frame)
        ctx.program, ctx.frame = program, frame
        ctx.saved = tuple(
            tensor for tensor in values if program.lifetimes[tensor][1] >= program.forward_length
        )
        ctx.save_for_backward(*(values[tensor] for tensor in ctx.saved))
        return tuple(values[output] for output in program.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        program = ctx.program
        values = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        values.update(zip(program.output_gradients, map(_contiguous, gradients), strict=True))
        with ctx.frame.running(backward=True):
            run(program, program.forward_length, len(program.operations), values, Hooks(), ctx.frame)
        results = dict(zip(program.differentiable, program.gradients, strict=True))
        found = (results.get(tensor) for tensor in (*program.inputs, *program.parameters))
        return None, None, None, *(None if gradient is None else values[gradient] for gradient in found)


def run(
    program: Program, start: int, stop: int, values: dict[VirtualTensor, torch.Tensor], hooks: Hooks, frame: Frame
) -> None:
    """Run operations `start` to `stop` - 1 on `values`, which gains their outputs and loses what has no reader left."""
    fused = _backend == "cpu" or (_backend is None and fused_available())
    for index in range(start, stop):
        operation = program.operations[index]
        began = time.perf_counter()
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        if hooks.before:
            hooks.before(operation, values)
        if fused:
            written = frame.tensors_for(index, operation)
            operation.definition.cpu(*inputs, *written, **operation.attributes)
            outputs = written[: len(operation.outputs)]
        else:
            outputs = operation.definition.reference(*inputs, **operation.attributes)
        for tensor, output in zip(operation.outputs, outputs, strict=True):
            if tensor is not None:
                values[tensor] = output
        if hooks.after:
            hooks.after(operation, values)
        frame.done(index, operation)
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor is not None and program.lifetimes.get(tensor, (0, stop))[1] == index:
                if tensor.role not in ("output", "gradient"):
                    values.pop(tensor, None)
        if _seconds is not None:
            _seconds[operation.name] += time.perf_counter() - began
