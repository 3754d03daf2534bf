"""Logits that are computed only when they are read: a cross-entropy does not read them.

A Logits may be reshaped on its way to torch.nn.functional.cross_entropy; every other function gets
the real logits. H hidden size, V words.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import distributed
from torch.utils._pytree import tree_map_only

from lsq.layers.linear import autocasts
from lsq.layers.module import beside_the_graph
from lsq.run.executor import once_differentiable

LATE = (
    "logits are computed only now, when somebody asks for them, and the weights have changed since"
    " the pass that they are of: look at them before the optimizer's step, or take logits.clone()"
    " there"
)


@dataclass(kw_only=True)
class Pass:
    """State that all logits of one pass share."""

    made_with: int
    """Version of the weight in that pass."""
    counted: bool = False
    """Whether a cross-entropy has read them."""
    wanted: bool = False
    """Whether gradients of the logits are asked for; a loss alone does not need them."""


class Logits(torch.Tensor):
    """Logits [..., V] that a lsq.layers.head.Head makes of `hidden` [..., H] when they are read.

    `before`: earlier logits, and the change that makes these of them; None: they begin a pass.
    """

    head: nn.Module
    hidden: torch.Tensor
    origin: Pass
    known: torch.Tensor | None
    """The real logits, once they were read with gradients enabled."""
    hooks: list[Callable]
    """Hooks on the gradient of the real logits: FSDP2 puts some on every output of a model."""
    views: list[weakref.ref]
    """These logits and their views, which would share memory if they were real tensors."""

    @staticmethod
    @beside_the_graph
    def __new__(
        cls,
        head: nn.Module,
        hidden: torch.Tensor,
        words: int,
        dtype: torch.dtype,
        before: tuple[Logits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> Logits:
        if before is None:
            origin = Pass(made_with=head.weight._version)
            made = _Projected.apply(cls, head, words, dtype, hidden, *head.parameters())
        else:
            origin = before[0].origin
            made = _Changed.apply(cls, (*hidden.shape[:-1], words), dtype, *before)
        made.head, made.hidden, made.origin = head, hidden, origin
        made.known, made.hooks, made.views = None, [], [weakref.ref(made)]
        return made

    def computed(self) -> torch.Tensor:
        """Return the real logits; with gradients enabled, every caller gets the same tensor."""
        if self.known is not None:
            return self.known
        if self.head.weight._version != self.origin.made_with:
            warnings.warn(LATE, stacklevel=2)
        rows = self.head.logits(self.hidden.reshape(-1, self.hidden.shape[-1]))
        found = rows.view(self.shape).to(self.dtype)
        if torch.is_grad_enabled():
            self.known = found = _Used.apply(self, self.origin, found, lambda gradient: gradient)
            for hook in self.hooks if found.requires_grad else ():
                found.register_hook(hook)
        return found

    def viewed(self) -> bool:
        """Whether another view of the same logits is alive."""
        return any(one() is not None and one() is not self for one in self.views)

    @classmethod
    @beside_the_graph
    def __torch_function__(
        cls, function, types, arguments=(), options: Mapping[str, Any] | None = None
    ):
        options = dict(options or {})
        name = getattr(function, "__name__", "")
        if function in _METADATA or (name == "__get__" and function not in _VIEWS):
            return _natively(function, *arguments, **options)
        if function in _OF_GRADIENTS:
            return _OF_GRADIENTS[function](*arguments, **options)
        if function in _FOLLOWED and arguments and getattr(arguments[0], "known", None) is None:
            found = _FOLLOWED[function](*arguments, **options)
            if found is not NotImplemented:
                return found
        own = arguments[0] if arguments and isinstance(arguments[0], Logits) else None
        if function is torch.Tensor.clone and own is not None and _passes_by(own):
            return _again(own, own.hidden, torch.clone)
        changes = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        if changes and own is not None and (not torch.is_grad_enabled() or own.viewed()):
            raise RuntimeError(
                f"{name} would change logits that are computed for each who asks: take"
                " logits.clone()"
            )
        # backward() follows the graph even where gradients are disabled
        going_back = function in (torch.autograd.backward, torch.Tensor.backward)
        with torch.set_grad_enabled(torch.is_grad_enabled() or going_back):
            arguments, options = tree_map_only(Logits, Logits.computed, (arguments, options))
        return function(*arguments, **options)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        """Compute logits for callers that bypass __torch_function__, such as autograd functions."""
        arguments, options = tree_map_only(
            Logits, lambda one: one.computed().detach(), (arguments, options or {})
        )
        return function(*arguments, **options)

    def __repr__(self) -> str:
        return f"Logits({tuple(self.shape)}, not computed)"


class _Projected(torch.autograd.Function):
    """Puts logits into autograd's graph, where DistributedDataParallel finds their parameters."""

    @staticmethod
    def forward(
        ctx,
        cls,
        head: nn.Module,
        words: int,
        dtype: torch.dtype,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ):
        ctx.made = head, dtype, hidden
        ctx.set_materialize_grads(False)
        shape = *hidden.shape[:-1], words
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor | None):
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        head, dtype, hidden = ctx.made
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[4])
            found = head.logits(hidden.reshape(-1, hidden.shape[-1])).view(gradient.shape).to(dtype)
        leaves = hidden, *head.parameters()
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        made = iter(torch.autograd.grad(found, wanted, gradient, allow_unused=True))
        gradients = [next(made) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, None, *gradients


class _Changed(torch.autograd.Function):
    """Logits made of earlier ones by another shape or dtype, or by selecting rows."""

    @staticmethod
    def forward(
        ctx, cls, shape: tuple[int, ...], dtype: torch.dtype, before: Logits, change: Callable
    ):
        ctx.made = before.shape, before.dtype, change
        ctx.set_materialize_grads(False)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=before.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor | None):
        if gradient is None:
            return (None,) * 5
        shape, dtype, change = ctx.made
        with torch.enable_grad():
            before = gradient.new_empty(shape, dtype=dtype).requires_grad_()  # values do not matter
            (found,) = torch.autograd.grad(change(before), before, gradient)
        return None, None, None, found, None


class _Used(torch.autograd.Function):
    """A result of logits: its gradient bypasses them, or uses `back` if theirs is wanted."""

    @staticmethod
    def forward(
        ctx,
        logits: Logits,
        origin: Pass,
        made: torch.Tensor,
        back: Callable[[torch.Tensor], torch.Tensor],
    ):
        ctx.made = origin, back  # known logits refer to this node, so it must not refer to them
        # the same memory, but no view: autograd forbids to change such a view in place
        return made.new_empty(0).set_(made)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        origin, back = ctx.made
        return (back(gradient), None, None, None) if origin.wanted else (None, None, gradient, None)


def _passes_by(logits: Logits) -> bool:
    """Whether DistributedDataParallel is copying logits that come beside their loss, unread."""
    # private to PyTorch; where it is missing, logits are computed for the copy
    sink = getattr(distributed, "_DDPSink", None)
    frame = sys._getframe() if sink is not None and logits.origin.counted else None
    while frame is not None and frame.f_code is not sink.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _hook(logits: Logits, hook: Callable):
    """Register a hook; hooks of FSDP2 run if logits get a gradient, but do not ask for one."""
    if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
        return _natively(torch.Tensor.register_hook, _wanted(logits), hook)
    logits.hooks.append(hook)
    return _natively(
        torch.Tensor.register_hook, logits, lambda given: None if given is None else hook(given)
    )


def _gradients(outputs, inputs, *arguments, **options):
    with torch.enable_grad():
        outputs = tree_map_only(Logits, Logits.computed, outputs)
    return _natively(
        torch.autograd.grad, outputs, tree_map_only(Logits, _wanted, inputs), *arguments, **options
    )


def _wanted(logits: Logits) -> Logits:
    logits.origin.wanted = True
    return logits


def _natively(function: Callable, *arguments, **options):
    with torch._C.DisableTorchFunctionSubclass():
        return function(*arguments, **options)


def _again(
    logits: Logits, hidden: torch.Tensor, change: Callable, dtype: torch.dtype | None = None
) -> Logits:
    """Return changed logits; `change` does to real logits what was done to `hidden`."""
    return Logits(logits.head, hidden, logits.shape[-1], dtype or logits.dtype, (logits, change))


def _seen(logits: Logits, hidden: torch.Tensor, change: Callable) -> Logits:
    made = _again(logits, hidden, change)
    made.views = logits.views
    made.views[:] = [*(one for one in made.views if one() is not None), weakref.ref(made)]
    return made


def _view(logits: Logits, *shape, **options):
    if options or not shape or isinstance(shape[0], torch.dtype):
        return NotImplemented
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    words = logits.shape[-1]
    if shape[-1] != words and (shape[-1] != -1 or logits.numel() != words * math.prod(shape[:-1])):
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return _seen(logits, hidden, lambda real: real.reshape(shape))


def _item(logits: Logits, index):
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) == 1 and isinstance(parts[0], torch.Tensor):
        masks = parts[0].dtype in (torch.bool, torch.uint8)
        if (parts[0].dim() if masks else 1) >= logits.dim():
            return NotImplemented
        return _again(logits, logits.hidden[index], lambda real: real[index])
    plain = all(part is Ellipsis or isinstance(part, int | slice) for part in parts)
    if plain and (len(parts) >= logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)):
        plain = parts[-1] == slice(None)
    if not plain:
        return NotImplemented
    return _seen(logits, logits.hidden[index], lambda real: real[index])


def _to(logits: Logits, *given, **options):
    dtype = given[0] if len(given) == 1 and not options else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return NotImplemented
    if dtype == logits.dtype:
        return logits
    return _again(logits, logits.hidden, lambda real: real.to(dtype), dtype)


def _cross_entropy(
    logits,
    target,
    weight=None,
    size_average=None,
    ignore_index: int = -100,
    reduce=None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
):
    usual = weight is None and size_average is None and reduce is None
    fits = isinstance(logits, Logits) and logits.dim() == 2 and not target.is_floating_point()
    if not usual or reduction not in ("mean", "sum") or not fits:
        return NotImplemented
    if target.shape != logits.shape[:1] or not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented
    logits.origin.counted = True
    loss = logits.head.loss(
        logits.hidden,
        target,
        ignore=ignore_index,
        smoothing=label_smoothing,
        mean=reduction == "mean",
    )
    dtype = torch.float32 if autocasts(logits.device.type) else logits.dtype
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }

    def back(gradient: torch.Tensor) -> torch.Tensor:
        real = logits.computed().detach()
        with torch.enable_grad():
            loss = functional.cross_entropy(real.requires_grad_().float(), target, **options)
            return torch.autograd.grad(loss.to(dtype), real, gradient)[0]

    return _Used.apply(logits, logits.origin, loss.to(dtype), back)


def _add(logits, other, *, alpha=1):
    """Skip a bias of zeros, as Marian's is; any other bias needs the real logits."""
    if not isinstance(logits, Logits) or type(other) not in (torch.Tensor, nn.Parameter):
        return NotImplemented
    fits = other.numel() == logits.shape[-1] and other.shape[-1:] == logits.shape[-1:]
    fits &= other.dim() <= logits.dim() and not other.requires_grad and alpha == 1
    fits &= torch.promote_types(other.dtype, logits.dtype) == logits.dtype
    zeros = fits and other.device.type == "cpu" and not other.any()
    return logits if zeros else NotImplemented


_CHANGES = {"__setitem__"} | {
    name
    for name in dir(torch.Tensor)
    if name.startswith("__i") and name.replace("__i", "__", 1) in dir(torch.Tensor)
}
"""Methods that change a tensor in place though their names do not end in _."""
_VIEWS = {
    getattr(torch.Tensor, name).__get__ for name in ("data", "T", "H", "mT", "mH", "real", "imag")
}
_METADATA: set[Callable] = {torch.is_floating_point, torch.is_tensor, torch.numel} | {
    getattr(torch.Tensor, name)
    for name in "__len__ dim get_device is_contiguous is_floating_point nelement numel size".split()
}
"""Functions that read no values: a wrapper without memory answers them."""
_OF_GRADIENTS: dict[Callable, Callable] = {
    torch.Tensor.register_hook: _hook,
    torch.Tensor.retain_grad: lambda logits: _natively(torch.Tensor.retain_grad, _wanted(logits)),
    torch.autograd.grad: _gradients,
}
_FOLLOWED: dict[Callable, Callable] = {
    torch.Tensor.view: _view,
    torch.Tensor.reshape: _view,
    torch.Tensor.__getitem__: _item,
    torch.Tensor.to: _to,
    torch.Tensor.float: lambda logits: _to(logits, torch.float32),
    torch.Tensor.contiguous: lambda logits, **options: NotImplemented if options else logits,
    torch.Tensor.add: _add,
    torch.Tensor.__add__: _add,
    torch.add: _add,
    functional.cross_entropy: _cross_entropy,
}
