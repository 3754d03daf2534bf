"""Logits that nobody has computed yet: a cross-entropy on them needs none.

M rows, H hidden, V words. Models of others project onto the vocabulary, then reshape what they get
and give it to torch.nn.functional.cross_entropy. A Logits goes along with that; anything else that
is asked of it gets the real ones.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.parallel import distributed
from torch.utils._pytree import tree_map_only

from lsq.layers.torch_compile import beside_the_graph
from lsq.run.executor import once_differentiable


class Head(Protocol):
    """A module that makes logits of rows."""

    weight: torch.Tensor
    """[V, H]"""

    def parameters(self) -> Iterable[torch.Tensor]:
        """All, which logits depend on."""

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Floats [M, V] of rows [M, H]."""

    def loss(
        self, rows: torch.Tensor, target: torch.Tensor, *, ignore: int, smoothing: float, mean: bool
    ) -> torch.Tensor:
        """Cross-entropy of target int64 [M], whose values `ignore` count for nothing: a float32
        scalar."""


LATE = (
    "logits are computed only now, when somebody asks for them, and the weights have changed since"
    " the pass that they "
    "are of: look at them before the optimizer's step, or take logits.clone() there"
)


@dataclass(kw_only=True)
class Pass:
    """State that all logits of one pass share."""

    parameters: tuple[torch.Tensor, ...]
    """The head's."""
    made_with: int
    """The version of its weight."""
    counted: bool = False
    """Whether a loss of them has been computed."""
    wanted: bool = False
    """Whether somebody waits for gradients of logits, which a loss of them does not need."""


class Logits(torch.Tensor):
    """Floats [..., V], of `hidden` [..., H] by a head.

    Args:
        head: whose they are.
        hidden: what they are made of.
        words: V.
        dtype: of the logits.
        before: the logits that they are made of, and how; None: they begin a pass.
    """

    head: Head
    hidden: torch.Tensor
    origin: Pass
    known: torch.Tensor | None
    """The logits, once somebody wanted them where gradients are."""
    hooks: list[Callable]
    """That wait for a gradient of the logits, if they are ever computed: FSDP2 puts some on
    whatever a model gives."""
    views: list[weakref.ref]
    """These and what has been viewed of them, which would be one memory if they were computed."""

    @staticmethod
    @beside_the_graph
    def __new__(
        cls,
        head: Head,
        hidden: torch.Tensor,
        words: int,
        dtype: torch.dtype,
        before: tuple[Logits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> Logits:
        if before is None:
            origin = Pass(parameters=tuple(head.parameters()), made_with=head.weight._version)
            made = _Projected.apply(cls, head, words, dtype, hidden, *origin.parameters)
        else:
            origin = before[0].origin
            made = _Changed.apply(cls, (*hidden.shape[:-1], words), dtype, *before)
        made.head, made.hidden, made.origin = head, hidden, origin
        made.known, made.hooks, made.views = None, [], [weakref.ref(made)]
        return made

    def computed(self) -> torch.Tensor:
        """The real ones; with gradients they are the same for everybody who asks."""
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
        """Whether somebody else has a view of them, or of what they are a view of."""
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
        if (
            function is torch.Tensor.clone
            and isinstance(arguments[0], Logits)
            and _passes_by(arguments[0])
        ):
            return _again(arguments[0], arguments[0].hidden, torch.clone)
        changed = (
            arguments[0]
            if arguments and (name in _CHANGES or name.endswith("_") > name.endswith("__"))
            else None
        )
        if isinstance(changed, Logits) and (not torch.is_grad_enabled() or changed.viewed()):
            raise RuntimeError(
                f"{name} would change logits that are computed for each who asks: take"
                " logits.clone()"
            )
        # which go by the graph in any mode
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
    """Logits in autograd's graph, behind what they are made of.

    So DistributedDataParallel sees which parameters they depend on. A function of autograd gets the
    real ones without a graph, and its gradient comes back here, where they are computed once more.
    """

    @staticmethod
    def forward(
        ctx,
        cls,
        head: Head,
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
        return (
            None,
            None,
            None,
            None,
            *(next(made) if leaf.requires_grad else None for leaf in leaves),
        )


class _Changed(torch.autograd.Function):
    """Logits that are others seen in another shape or dtype, or some rows of these."""

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
            before = gradient.new_empty(shape, dtype=dtype).requires_grad_()  # no value matters
            (found,) = torch.autograd.grad(change(before), before, gradient)
        return None, None, None, found, None


class _Used(torch.autograd.Function):
    """A result computed from logits.

    Its gradient goes past them to what they are made of, unless theirs is wanted.

    `back` makes the gradient of the logits of that of `made`.
    """

    @staticmethod
    def forward(
        ctx,
        logits: Logits,
        origin: Pass,
        made: torch.Tensor,
        back: Callable[[torch.Tensor], torch.Tensor],
    ):
        ctx.made = origin, back  # known logits hold this: it must not hold them
        # the same memory, but no view, which nobody might change in place
        return made.new_empty(0).set_(made)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        origin, back = ctx.made
        return (back(gradient), None, None, None) if origin.wanted else (None, None, gradient, None)


def _passes_by(logits: Logits) -> bool:
    """Whether it is DistributedDataParallel that copies logits, and has their loss beside them.

    With find_unused_parameters=True or static_graph=True it puts copies of what a model gives into
    its own graph, where losses are needed; nobody may ever look at these logits.
    """
    # PyTorch's own; without it logits are computed for the copy
    sink = getattr(distributed, "_DDPSink", None)
    frame = sys._getframe() if sink is not None and logits.origin.counted else None
    while frame is not None and frame.f_code is not sink.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _hook(logits: Logits, hook: Callable):
    """FSDP2's only wait for the backward pass, and see no gradient of what is not computed; others
    want theirs."""
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
    """Logits that are made of others: `change` does to the real ones what was done to `hidden`."""
    return Logits(logits.head, hidden, logits.shape[-1], dtype or logits.dtype, (logits, change))


def _seen(logits: Logits, hidden: torch.Tensor, change: Callable) -> Logits:
    """Their view of these rows."""
    made = _again(logits, hidden, change)
    made.views = logits.views
    made.views[:] = [*(one for one in made.views if one() is not None), weakref.ref(made)]
    return made


def _view(logits: Logits, *shape, **options):
    """The last dimension stays, or is not looked at."""
    if options or not shape or isinstance(shape[0], torch.dtype):
        return NotImplemented
    shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    words = logits.shape[-1]
    if shape[-1] not in (words, -1):
        return NotImplemented
    if shape[-1] == -1 and logits.numel() != words * _product(shape[:-1]):
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return _seen(logits, hidden, lambda real: real.reshape(shape))


def _product(sizes) -> int:
    whole = 1
    for size in sizes:
        whole *= size
    return whole


def _item(logits: Logits, index):
    """An index of other dimensions than the last."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(part is Ellipsis or isinstance(part, int | slice) for part in parts)
    masked = (
        len(parts) == 1 and isinstance(parts[0], torch.Tensor) and _taken(parts[0]) < logits.dim()
    )
    if plain and (len(parts) >= logits.dim() or (Ellipsis in parts and parts[-1] is not Ellipsis)):
        plain = parts[-1] == slice(None)
    if plain:
        return _seen(logits, logits.hidden[index], lambda real: real[index])
    return (
        _again(logits, logits.hidden[index], lambda real: real[index]) if masked else NotImplemented
    )


def _taken(index: torch.Tensor) -> int:
    """Count the dimensions that an index consumes."""
    return index.dim() if index.dtype in (torch.bool, torch.uint8) else 1


def _to(logits: Logits, *given, **options):
    if (
        options
        or len(given) != 1
        or not isinstance(given[0], torch.dtype)
        or not given[0].is_floating_point
    ):
        return NotImplemented
    (dtype,) = given
    return (
        logits
        if dtype == logits.dtype
        else _again(logits, logits.hidden, lambda real: real.to(dtype), dtype)
    )


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
    plain = (
        weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    )
    if not (
        plain
        and isinstance(logits, Logits)
        and logits.dim() == 2
        and not target.is_floating_point()
    ):
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
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }

    def back(gradient: torch.Tensor) -> torch.Tensor:
        real = logits.computed().detach()
        with torch.enable_grad():
            loss = functional.cross_entropy(real.requires_grad_().float(), target, **options).to(
                dtype
            )
            return torch.autograd.grad(loss, real, gradient)[0]

    return _Used.apply(logits, logits.origin, loss.to(dtype), back)


def _add(logits, other, *, alpha=1):
    """A bias of zeros, as Marian's is."""
    if not (
        isinstance(logits, Logits)
        and isinstance(other, torch.Tensor)
        and not isinstance(other, Logits)
    ):
        return NotImplemented
    fits = (
        other.shape[-1:] == logits.shape[-1:]
        and other.numel() == logits.shape[-1]
        and not other.requires_grad
    )
    fits = (
        fits
        and other.dim() <= logits.dim()
        and torch.promote_types(other.dtype, logits.dtype) == logits.dtype
    )
    return (
        logits
        if fits and alpha == 1 and other.device.type == "cpu" and not other.any()
        else NotImplemented
    )


_CHANGES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__idiv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
}
"""Methods that change a tensor in place, beside those whose names end in _."""
_VIEWS = {
    getattr(torch.Tensor, name).__get__ for name in ("data", "T", "H", "mT", "mH", "real", "imag")
}
_METADATA: set[Callable] = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_contiguous,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
    torch.Tensor.get_device,
    torch.is_tensor,
}
"""Functions that a wrapper without memory answers itself."""
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
