"""The tensors of a model's products while it runs: what they read, and the gradients of what they
give.

Products of plain PyTorch are seen by a TorchFunctionMode, those of lsq's programs by a backend
around the module's own. M rows, N outputs and K inputs of a weight.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lsq.layers.module import ProgramModule
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.project import Project
from lsq.ops.vocabulary_loss import VocabularyLoss, VocabularyLossGradient
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation
from lsq.study.tensors import (
    ACTIVATION,
    GRADIENT,
    WEIGHT,
    Sample,
    as_rows,
    chosen_by,
    parameters_of,
    take,
)

CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


def gather(
    model: nn.Module, run: Callable[[], Tensor | None], patterns: Iterable[str], largest: int
) -> list[Sample]:
    """Weights of a model, and the first activation and gradient of each product while `run`
    computes; see `measure`.

    Raises:
        ValueError: a pattern fits nothing, `run` returns something else, or the model has no
            weight.
    """
    weights = parameters_of(model)
    if not weights:
        raise ValueError(
            f"{type(model).__name__} has no float parameter with two or more dimensions"
        )
    seen = _Seen(weights, chosen_by(patterns, weights), largest)
    with _in_floats(model, seen), _gradients_kept(model), torch.enable_grad(), _Functions(seen):
        loss = run()
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(
                    f"run returned a tensor of shape {list(loss.shape)}; return a loss, one number"
                )
            if loss.requires_grad:
                loss.backward()
        elif loss is not None:
            raise ValueError(
                f"run returned a {type(loss).__name__}; return a loss, one number, or None"
            )
    found = [
        take(name, WEIGHT, weight.t() if name in seen.in_out else as_rows(weight), largest)
        for name, weight in {**weights, **seen.masked}.items()
        if name in seen.chosen
    ]
    return [*found, *seen.samples.values()]


class _Seen:
    """What was seen so far, by kind and name of the weight."""

    def __init__(self, weights: dict[str, Tensor], chosen: set[str], largest: int):
        self.chosen, self._largest = chosen, largest
        self.samples: dict[tuple[str, str], Sample] = {}
        self.in_out: set[str] = set()
        """Names of weights that are [K, N]."""
        self.masked: dict[str, Tensor] = {}
        """What masks leave of weights, by their names; as long as they are here, nothing else takes
        their place."""
        self._all = len(weights)
        self._places = {weight.data_ptr(): (name, weight) for name, weight in weights.items()}
        self._storages = {
            weight.untyped_storage().data_ptr(): name for name, weight in weights.items()
        }

    def mask(self, weight: Tensor, masked: Tensor) -> None:
        """Know what is left of a weight by its name."""
        name = self._places.get(weight.data_ptr(), ("",))[0]
        if name and masked is not weight:
            self.masked[name] = masked
            self._places[masked.data_ptr()] = name, masked

    def note(self, kind: str, weight: Tensor, tensor: Tensor, *, in_out: bool = False) -> None:
        """Take samples of a tensor [..., K] or [..., N] of a product with `weight`, unless there
        are any."""
        if in_out:
            self.in_out.add(self._names(weight)[0])
        for parameter, name, rows in self._parts(weight):
            wanted = parameter in self.chosen or not parameter and len(self.chosen) == self._all
            if wanted and (kind, name) not in self.samples:
                part = tensor[..., rows] if kind == GRADIENT else tensor
                self.samples[kind, name] = take(name, kind, part, self._largest)

    def _parts(self, weight: Tensor) -> Iterator[tuple[str, str, slice]]:
        """(name of the parameter, name of its product, its rows) of the parameters that lie in a
        weight [N, K]."""
        found, first = [], weight.data_ptr()
        while first in self._places and weight.is_contiguous():
            name, parameter = self._places[first]
            found.append((name, parameter))
            first += parameter.nbytes
            if first >= weight.data_ptr() + weight.nbytes:
                break
        if len(found) < 2 or first != weight.data_ptr() + weight.nbytes:
            yield *self._names(weight), slice(None)
            return
        begin = 0
        for name, parameter in found:
            yield name, name, slice(begin, begin + len(parameter))
            begin += len(parameter)

    def _names(self, weight: Tensor) -> tuple[str, str]:
        """(name of the parameter, name of its product), which differ where the weight is part of
        the parameter.

        A weight that is made while the model runs is no parameter and goes by its shape.
        """
        if weight.data_ptr() in self._places:
            name = self._places[weight.data_ptr()][0]
            return name, name
        name = self._storages.get(weight.untyped_storage().data_ptr())
        if name is None:
            return "", f"a weight made of others {list(weight.shape)}"
        return name, f"{name}[{weight.storage_offset() // max(weight.shape[-1], 1)}:]"


class _Functions(TorchFunctionMode):
    """Notes products of PyTorch's functions."""

    def __init__(self, seen: _Seen):
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with _linear_replaced(self._linear):
                return func(*args, **kwargs)
        if func in CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func is torch.addmm and len(args) == 3 and isinstance(args[2], nn.Parameter):
            bias, x, weight = args
            return self._noted(x, weight, func(bias, x, weight, **kwargs), in_out=True)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._noted(input, weight, _linear(input, weight, bias))

    def _convolution(
        self, func: Callable, input: Tensor, weight: Tensor, *args, **kwargs
    ) -> Tensor:
        return self._noted(
            input, weight, func(input, weight, *args, **kwargs), channels=-weight.dim() + 1
        )

    def _noted(
        self, x: Tensor, weight: Tensor, y: Tensor, *, in_out: bool = False, channels: int = -1
    ) -> Tensor:
        """`channels`: the dimension of x and y that becomes the last one."""
        self._seen.note(ACTIVATION, weight, x.movedim(channels, -1), in_out=in_out)
        if not y.requires_grad:
            return y
        y.register_hook(
            lambda gradient: self._seen.note(GRADIENT, weight, gradient.movedim(channels, -1))
        )
        # y may be a view, which would lose the hook to whoever changes it in place
        return y.clone()


_linear = functional.linear


@contextlib.contextmanager
def _linear_replaced(other: Callable) -> Iterator[None]:
    """Within this context PyTorch's own functions in Python, which no mode sees, multiply by
    another linear."""
    functional.linear = other
    try:
        yield
    finally:
        functional.linear = _linear


class _Watching(Backend):
    """Runs operations one by one as another backend does, and notes those of products."""

    def __init__(self, inner: Backend, seen: _Seen):
        for name in Backend.__annotations__:
            setattr(self, name, getattr(inner, name))
        self.refillable = False  # so that every operation comes here with its tensors
        self.scratch, self.check, self.allocate = inner.scratch, inner.check, inner.allocate
        self._inner, self._seen = inner, seen

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        run = self._inner.prepare(calls)

        def run_and_note() -> None:
            run()
            for operation, _ in calls:
                self._look(operation)

        return run_and_note

    def _look(self, operation: Operation) -> None:
        if isinstance(operation, Project):
            note = functools.partial(self._seen.note, in_out=operation.weight.in_out)
            note(ACTIVATION, operation.weight.values, operation.x.floats)
        elif isinstance(operation, VocabularyLoss):
            self._seen.note(
                ACTIVATION, operation.prediction.weight.values, operation.prediction.x.floats
            )
        elif isinstance(operation, VocabularyLossGradient):
            self._seen.note(GRADIENT, operation.prediction.weight.values, operation.dlogits)
        elif isinstance(operation, ProjectWeightGradient | ProjectInputGradient):
            self._seen.note(GRADIENT, operation.weight.values, operation.floats)


@contextlib.contextmanager
def _in_floats(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Within this context a model is in eval mode, and lsq's modules compute in floats and are
    watched."""
    trained = [module for module in model.modules() if module.training]
    programs = [module for module in model.modules() if isinstance(module, ProgramModule)]
    before = [(module, module.backend, module.schedule.float_fallback) for module in programs]
    watching = functools.cache(lambda inner: _Watching(inner, seen))
    try:
        model.eval()
        for module in programs:
            module.backend, module.schedule.float_fallback = watching(module.target), True
            if module.weight_masks is not None:
                module.values_of = functools.partial(_values_of, module, seen)
        yield
    finally:
        for module in programs:
            vars(module).pop("values_of", None)
        for module, backend, fallen in before:
            module.backend, module.schedule.float_fallback = backend, fallen
        for module in trained:
            module.training = True


def _values_of(module: ProgramModule, seen: _Seen, name: str) -> Tensor:
    """The module's own, whose results are known by name from then on."""
    values = type(module).values_of(module, name)
    seen.mask(module.own_parameter(name), values)
    return values


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Within this context parameters have no gradients; then those that they had."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
