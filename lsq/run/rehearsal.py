"""Rehearsal: a training step runs for its order alone.

Programs note that they were called and compute nothing.

Everything around them is real: the model's own code, autograd, the order in which it goes back. So
the order is right for any model, however it shares, repeats or wires its layers.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lsq.program.program import Program

MOST = 5
"""Classes of modules that are named."""
_active: ContextVar["Rehearsal | None"] = ContextVar("rehearsal", default=None)
"""Rehearsals are of one thread: others go on computing."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of one program: forward, or backward."""

    node: int
    """Number of the program's run in the step; a forward and its backward share it."""
    program: Program
    backward: bool
    reads: tuple[int | None, ...]
    """The tensors behind the program's inputs and parameters, numbered over the step; None: neither
    a result of another program nor one for which autograd gathers a gradient.
    """
    makes: tuple[int, ...]
    """Numbers of its results."""


class Rehearsal:
    """The record of a rehearsed step.

    Attributes:
        passes: the passes of all programs that have a backward pass, in their order.
        owners: the module that ran each node.
        programs: all that ran, also those without a backward pass.
    """

    def __init__(self):
        self.programs: list[Program] = []
        self.passes: list[Pass] = []
        self.owners: list[object] = []
        self._borders: list[tuple[tuple[int | None, ...], tuple[int, ...]]] = []
        self._numbers: dict[int, int] = {}
        self._made: list[torch.Tensor] = []
        """All that have one, so that each number stands for one tensor as long as the rehearsal
        goes on."""
        self._count = itertools.count()

    def run(
        self, owner: object, program: Program, tensors: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Note a run of `program` by `owner`; zeros come back, without memory behind them."""
        self.programs.append(program)
        device = next(iter(tensors.values())).device
        if not program.output_gradients:
            return _zeros(program.outputs, device)
        given = [tensors.get(tensor.name) for tensor in (*program.inputs, *program.parameters)]
        makes = tuple(next(self._count) for _ in program.outputs)
        self._borders.append((tuple(map(self._number, given)), makes))
        results = _Noted.apply(self, owner, program, device, *given)
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

    def begin(self, owner: object, program: Program) -> int:
        """Note a forward pass; the node's number."""
        node = len(self.owners)
        self.owners.append(owner)
        self._note(node, program, backward=False)
        return node

    def end(self, node: int, program: Program) -> None:
        """Note a backward pass."""
        self._note(node, program, backward=True)

    def _note(self, node: int, program: Program, *, backward: bool) -> None:
        reads, makes = self._borders[node]
        self.passes.append(
            Pass(node=node, program=program, backward=backward, reads=reads, makes=makes)
        )


class _Noted(torch.autograd.Function):
    """A run of a program in autograd's graph that leaves only its name."""

    @staticmethod
    def forward(
        ctx, rehearsal: Rehearsal, owner: object, program: Program, device: torch.device, *arguments
    ):
        ctx.rehearsal, ctx.program, ctx.device = rehearsal, program, device
        ctx.node = rehearsal.begin(owner, program)
        return _zeros(program.outputs, device)

    @staticmethod
    def backward(ctx, *gradients):
        program = ctx.program
        ctx.rehearsal.end(ctx.node, program)
        results = dict(zip(program.differentiable, program.gradients, strict=True))
        found = (results.get(tensor) for tensor in (*program.inputs, *program.parameters))
        made = (
            None if gradient is None else _zeros([gradient], ctx.device)[0] for gradient in found
        )
        return None, None, None, None, *made


def _zeros(tensors, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        for tensor in tensors
    )


def active() -> Rehearsal | None:
    """The rehearsal that is going on, if any."""
    return _active.get()


@contextmanager
def rehearsing() -> Iterator[Rehearsal]:
    """Inside, modules note their programs in the rehearsal instead of running them."""
    rehearsal = Rehearsal()
    token = _active.set(rehearsal)
    try:
        yield rehearsal
    finally:
        _active.reset(token)


def rehearse(step: Callable[[], torch.Tensor], parameters) -> Rehearsal:
    """Rehearse `step`, which returns a loss, and its backward pass.

    No gradient is left behind, and torch's random numbers go on as if nothing had been.

    Raises:
        ValueError: `step` returns no scalar, goes back by itself, or its loss depends on no trained
            layer of lsq.
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
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else repr(type(loss).__name__)
        )
        raise ValueError(f"the step returned {found}; it must return the loss, a scalar tensor")
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
def counting_kept(model: nn.Module, found: Counter) -> Iterator[None]:
    """Add to `found` the bytes that others' code keeps for the backward pass: class of the
    innermost module -> bytes.

    For a rehearsed step, in which lsq's layers keep nothing. Every storage counts once, parameters
    do not.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    inside: list[str] = []
    held = []  # else a storage that is freed could lend its address to the next

    def enter(module: nn.Module, inputs: tuple) -> None:
        inside.append(type(module).__name__)

    def leave(module: nn.Module, inputs: tuple, outputs: object) -> None:
        inside.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            held.append(tensor)
            # what a rehearsal makes has one value in memory
            whole = tensor.numel() * tensor.element_size()
            found[inside[-1] if inside else "the loss"] += max(storage.nbytes(), whole)
        return tensor

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def described(outside: Mapping[str, int]) -> str:
    """Describe the bytes that modules of others keep, by class."""
    if not outside:
        return "nothing is kept"
    parts = [f"{name} {size / 2**20:.1f}" for name, size in Counter(outside).most_common(MOST)]
    others = f", {len(outside) - MOST} others" if len(outside) > MOST else ""
    total = sum(outside.values()) / 2**20
    return f"{total:.1f} MiB are kept by modules that are not lsq's ({', '.join(parts)}{others})"
