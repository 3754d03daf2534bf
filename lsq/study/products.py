"""The products of a running model: sample them, or replace their inputs.

M rows, N outputs and K inputs of a weight.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
Look = Callable[[str, Tensor, bool], Tensor]
"""(weight's name, input [..., K], whether the weight is [K, N]) -> what the product reads."""


@dataclass(frozen=True, eq=False)
class Product:
    x: Tensor
    weight: Tensor
    multiply: Callable[[Tensor], Tensor]
    in_out: bool = False
    channels: int = -1
    """The dimension of x that the product sums over, and of y that it makes."""


class ReplacedProducts(TorchFunctionMode):
    """Context in which `replace` computes every product of linear, addmm and convolutions."""

    def __init__(self, replace: Callable[[Product], Tensor]):
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # a mode does not see its products
            functional.linear = self._linear
            try:
                return func(*args, **kwargs)
            finally:
                functional.linear = _linear
        if func in CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func is torch.addmm and len(args) == 3:
            bias, x, weight = args
            product = Product(
                x, weight, lambda x: torch.addmm(bias, x, weight, **kwargs), in_out=True
            )
            return self._replace(product)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._replace(Product(input, weight, lambda x: _linear(x, weight, bias)))

    def _convolution(
        self, func: Callable, input: Tensor, weight: Tensor, *args, **kwargs
    ) -> Tensor:
        product = Product(
            input, weight, lambda x: func(x, weight, *args, **kwargs), channels=-weight.dim() + 1
        )
        return self._replace(product)


_linear = functional.linear


def inputs_replaced(weights: Mapping[str, Tensor], look: Look) -> ReplacedProducts:
    """Let products with `weights`, or parts of them, read what `look` returns in this context."""
    bounds = {
        name: (weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size())
        for name, weight in weights.items()
    }

    def replaced(product: Product) -> Tensor:
        x, weight = product.x, product.weight
        if product.channels == -1:
            address = weight.data_ptr()
            names = (name for name, (first, end) in bounds.items() if first <= address < end)
            name = next(names, None)
            if name is not None:
                x = look(name, x, weight.stride(0 if product.in_out else -1) != 1)
        return product.multiply(x)

    return ReplacedProducts(replaced)


def gather(
    model: nn.Module, run: Callable[[], Tensor | None], patterns: Iterable[str], largest: int
) -> list[Sample]:
    """Sample a model's weights, and for each the activation and gradient of its first product."""
    weights = parameters_of(model)
    seen = _Seen(weights, chosen_by(patterns, weights), largest)
    products = ReplacedProducts(seen.noted)
    with _in_floats(model, seen), _gradients_kept(model), torch.enable_grad(), products:
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
    samples = [
        take(name, WEIGHT, weight.t() if name in seen.in_out else as_rows(weight), largest)
        for name, weight in {**weights, **seen.masked}.items()
        if name in seen.chosen
    ]
    return [*samples, *seen.samples.values()]


class _Seen:
    """Samples of products by (kind, name of the weight)."""

    def __init__(self, weights: dict[str, Tensor], chosen: set[str], largest: int):
        self.chosen, self._largest = chosen, largest
        self.samples: dict[tuple[str, str], Sample] = {}
        self.in_out: set[str] = set()
        self.masked: dict[str, Tensor] = {}
        """Masked weights by name; kept here so that no other tensor gets their addresses."""
        self._all = len(weights)
        self._by_address = {weight.data_ptr(): (name, weight) for name, weight in weights.items()}
        self._by_storage = {
            weight.untyped_storage().data_ptr(): name for name, weight in weights.items()
        }

    def mask(self, weight: Tensor, masked: Tensor) -> None:
        name = self._by_address.get(weight.data_ptr(), ("",))[0]
        if name and masked is not weight:
            self.masked[name] = masked
            self._by_address[masked.data_ptr()] = name, masked

    def noted(self, product: Product) -> Tensor:
        x, weight, channels = product.x, product.weight, product.channels
        y = product.multiply(x)
        if product.in_out and not isinstance(weight, nn.Parameter):
            return y
        self.note(ACTIVATION, weight, x.movedim(channels, -1), in_out=product.in_out)
        if not y.requires_grad:
            return y
        y.register_hook(
            lambda gradient: self.note(GRADIENT, weight, gradient.movedim(channels, -1))
        )
        # y may be a view, which loses its hook if it is changed in place
        return y.clone()

    def note(self, kind: str, weight: Tensor, tensor: Tensor, *, in_out: bool = False) -> None:
        """Sample a tensor [..., K] or [..., N], if it is of the first product with `weight`."""
        if in_out:
            self.in_out.add(self._names(weight)[0])
        for parameter, name, rows in self._parts(weight):
            wanted = parameter in self.chosen or not parameter and len(self.chosen) == self._all
            if wanted and (kind, name) not in self.samples:
                part = tensor[..., rows] if kind == GRADIENT else tensor
                self.samples[kind, name] = take(name, kind, part, self._largest)

    def _parts(self, weight: Tensor) -> Iterator[tuple[str, str, slice]]:
        """Yield (name, name of its product, its rows) for each parameter in a weight [N, K]."""
        parameters, address = [], weight.data_ptr()
        end = address + weight.nbytes
        while address in self._by_address and weight.is_contiguous():
            parameters.append(self._by_address[address])
            address += parameters[-1][1].nbytes
            if address >= end:
                break
        if len(parameters) < 2 or address != end:
            yield *self._names(weight), slice(None)
            return
        begin = 0
        for name, parameter in parameters:
            yield name, name, slice(begin, begin + len(parameter))
            begin += len(parameter)

    def _names(self, weight: Tensor) -> tuple[str, str]:
        """Return (name of the parameter, name of its product): these differ for a part of it."""
        if weight.data_ptr() in self._by_address:
            name = self._by_address[weight.data_ptr()][0]
            return name, name
        name = self._by_storage.get(weight.untyped_storage().data_ptr())
        if name is None:
            return "", f"a weight made of others {list(weight.shape)}"
        return name, f"{name}[{weight.storage_offset() // max(weight.shape[-1], 1)}:]"


class _Watching(Backend):
    """Runs operations one by one on another backend, and samples tensors of products."""

    def __init__(self, inner: Backend, seen: _Seen):
        for name in Backend.__annotations__:
            setattr(self, name, getattr(inner, name))
        self.refillable = False  # so that every operation comes with its tensors
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
    """Put a model into eval mode in this context; lsq's modules run in floats, and are sampled."""
    trained = [module for module in model.modules() if module.training]
    programs = [module for module in model.modules() if isinstance(module, ProgramModule)]
    before = [(m, m.backend, m.schedule.float_fallback) for m in programs]
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
        for module, backend, fallback in before:
            module.backend, module.schedule.float_fallback = backend, fallback
        for module in trained:
            module.training = True


def _values_of(module: ProgramModule, seen: _Seen, name: str) -> Tensor:
    values = type(module).values_of(module, name)
    seen.mask(module.own_parameter(name), values)
    return values


@contextlib.contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """Set gradients of parameters to None in this context, and restore them."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
