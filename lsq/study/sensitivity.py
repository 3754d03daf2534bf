"""What each tensor's format costs in loss: measured exactly, one tensor at a time, and estimated
from gradients."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lsq.layers.module import ProgramModule
from lsq.quant.numbers import METHODS, scaled_format
from lsq.study.costs import Cost, Costs, TensorCosts, read_costs, write_costs
from lsq.study.estimate import Gradients, Loss, Rounding, Sums, gradients
from lsq.study.inputs import Look, products
from lsq.study.tensors import ACTIVATION, WEIGHT, chosen_by, parameters_of

FORMATS = (
    "int8/row",
    "int6/row",
    "int4/group32",
    "vsquant4",
    "nvfp4",
    "int3/group32",
    "int2/group16",
)
"""What is tried where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is said of a measurement while it goes on, and where."""

    path: Path | None = None
    """File that is written after each tensor; if it is there, what it holds is not measured again.
    """
    anew: bool = False
    """Whether everything is measured again, and such a file replaced once the first tensor is done.
    """
    about: Mapping[str, Any] = field(default_factory=dict)
    """In the result: what the model and the batches are. Plain values, as JSON has them."""
    progress: Callable[[int, int, str], object] | None = None
    """Called after each tensor with (how many are done, of how many, name)."""

    def write(self, costs: Costs) -> None:
        """Put what is measured so far into the file."""
        if self.path is not None:
            write_costs(self.path, costs)


def sensitivity(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    *,
    samples: Sequence[Any] | None = None,
    formats: Sequence[str] = FORMATS,
    clip: str = "mse",
    tensors: Iterable[str] = (),
    activations: bool = True,
    keep: Keep | None = None,
) -> Costs:
    """What each weight of two dimensions or more costs in each format, and what products with it
    read.

    The model is in eval mode meanwhile, so that nothing is random; afterwards all is as it was, bit
    by bit, also after an exception. Of lsq's own layers, whose programs round by themselves,
    activations are not seen, and what a weight costs comes on top of their rounding.

    Args:
        model: on any device.
        loss: (model, batch) -> (sum of the batch's losses, a scalar with gradients; how many they
            are). The estimate is for negative log-likelihoods in nats, such as cross-entropy.
        batches: for what is measured; the loss is the mean over all.
        samples: for the estimate, best one sentence each (see lsq.study.estimate); None: the
            batches.
        formats: names of lsq.quant.numbers.scaled_format; rows of blocks lie along what the product
            sums over.
        clip: how clips of weights are measured. Those of activations are their largest values.
        tensors: patterns with * and ? of names of weights; none: all.
        activations: whether they are measured, too.
        keep: what is said of the measurement, and where; None: nothing, nowhere.

    Raises:
        ValueError: an argument is wrong, a pattern fits nothing, a weight or the loss is not
            finite, the loss is another every time, or its file holds something else.
        OSError: that file cannot be written.
    """
    if clip not in METHODS:
        raise ValueError(f"clip is {clip!r}; allowed: {', '.join(map(repr, METHODS))}")
    rounding = {name: Rounding(form=scaled_format(name), clip=clip) for name in formats}
    if not rounding:
        raise ValueError("there are no formats; name one at least")
    samples, keep = batches if samples is None else samples, keep or Keep()
    trial = _Trial(
        model=model, loss=loss, batches=batches, weights=_weights(model, tensors), rounding=rounding
    )
    with _still(model, trial.weights.values()):
        before, count = trial.mean_loss(trial.look)
        again, _ = trial.mean_loss(_as_it_is)
        if not math.isfinite(before):
            raise ValueError(
                f"the batches have a loss of {before:g}; give a model and batches with a finite one"
            )
        if not math.isclose(before, again, rel_tol=1e-6):
            raise ValueError(
                f"the same batches have losses of {before:g} and {again:g}; make the loss"
                " deterministic"
            )
        costs = Costs(
            about=dict(keep.about),
            weights=_digest(trial.weights),
            clip=clip,
            formats=tuple(rounding),
            loss=before,
            count=count,
            samples=len(samples),
        )
        wanted = [(WEIGHT, name) for name in trial.weights]
        wanted += [
            (ACTIVATION, name) for name in trial.weights if activations and name in trial.values
        ]
        if keep.path is not None and not keep.anew:
            costs = _resumed(costs, [trial.costs(*one, {}) for one in wanted], keep.path)
        done = {(tensor.kind, tensor.name) for tensor in costs.tensors}
        left = [one for one in wanted if one not in done]
        if left:
            read = {name for kind, name in left if kind == ACTIVATION}
            found = gradients(model, loss, samples, trial.weights, read, rounding)
        for number, (kind, name) in enumerate(left, len(wanted) - len(left) + 1):
            measured = getattr(trial, kind)(name, found, before)
            costs = replace(costs, tensors=(*costs.tensors, measured))
            keep.write(costs)
            if keep.progress is not None:
                keep.progress(number, len(wanted), name)
    costs = replace(costs, finished=True)
    keep.write(costs)
    return costs


@dataclass(kw_only=True)
class _Trial:
    """A model in eval mode, and what is done to it."""

    model: nn.Module
    loss: Loss
    batches: Sequence[Any]
    weights: Mapping[str, nn.Parameter]
    rounding: Mapping[str, Rounding]
    values: dict[str, int] = field(default_factory=dict)
    """Name of a weight that products were seen to read -> values that they met it with."""
    transposed: set[str] = field(default_factory=set)
    """Weights that lie as [K, N]."""

    def look(self, name: str, x: Tensor, transposed: bool) -> Tensor:
        """Note which weights are read, and how they lie."""
        self.values[name] = self.values.get(name, 0) + x.numel()
        if transposed:
            self.transposed.add(name)
        return x

    @torch.no_grad()
    def mean_loss(self, look: Look) -> tuple[float, float]:
        """(mean of the losses of all batches, how many they are).

        Raises:
            ValueError: there are none.
        """
        total = count = 0.0
        with products(self.weights, look):
            for batch in self.batches:
                value, number = self.loss(self.model, batch)
                total, count = total + float(value), count + float(number)
        if not count > 0:
            raise ValueError("the batches have no losses; give some with words to predict")
        return total / count, count

    def weight(self, name: str, found: Gradients, before: float) -> TensorCosts:
        """Costs of a weight."""
        weight, transposed, formats = self.weights[name], name in self.transposed, {}
        values = weight.detach()
        for form, how in self.rounding.items():
            rounded = how.weight(weight, transposed)
            sums = Sums()
            sums.add(
                values, rounded.double() - values.double(), found.sums[name], found.squares[name]
            )
            with _replaced(weight, rounded):
                loss, _ = self.mean_loss(_as_it_is)
            formats[form] = _cost(sums, found.count, how.bits(weight, transposed), loss - before)
        return self.costs(WEIGHT, name, formats)

    def activation(self, name: str, found: Gradients, before: float) -> TensorCosts:
        """Costs of what products with a weight read."""
        formats = {}
        for form, how in self.rounding.items():
            bits = 0.0

            def look(of: str, x: Tensor, transposed: bool, how=how) -> Tensor:
                nonlocal bits
                if of != name:
                    return x
                bits += how.form.total_bits(x.shape)
                return how.activation(x)

            loss, _ = self.mean_loss(look)
            formats[form] = _cost(
                found.activations[name, form], found.count, bits / self.values[name], loss - before
            )
        return self.costs(ACTIVATION, name, formats)

    def costs(self, kind: str, name: str, formats: dict[str, Cost]) -> TensorCosts:
        """Of a tensor of one of KINDS: what is known of it, with these costs."""
        weight = self.weights[name]
        return TensorCosts(
            name=name,
            kind=kind,
            shape=tuple(weight.shape),
            transposed=name in self.transposed,
            formats=formats,
            values=weight.numel() if kind == WEIGHT else self.values[name],
        )


def _as_it_is(name: str, x: Tensor, transposed: bool) -> Tensor:
    return x


def _cost(sums: Sums, count: float, bits: float, cost: float) -> Cost:
    return Cost(
        bits=bits,
        cost=cost if math.isfinite(cost) else None,
        first=sums.first / count,
        second=sums.second / (2 * count),
        error=sums.noise / sums.signal if sums.signal > 0 else 0.0,
    )


def _weights(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Parameter]:
    """What is measured, each parameter once.

    Raises:
        ValueError: nothing is, a pattern fits nothing, or a value is not finite.
    """
    there = {name: weight for name, weight in parameters_of(model).items() if weight.numel()}
    if not there:
        raise ValueError(
            f"{type(model).__name__} has no float parameter with two or more dimensions"
        )
    chosen = chosen_by(patterns, there)
    found = {name: parameter for name, parameter in there.items() if name in chosen}
    for name, parameter in found.items():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds infinities or NaN; give a model without")
    return found


def _digest(weights: Mapping[str, Tensor]) -> str:
    made = hashlib.sha256()
    for name, weight in weights.items():
        made.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        made.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _resumed(costs: Costs, wanted: Iterable[TensorCosts], path: Path) -> Costs:
    """What the file holds of these, or what they are without one.

    Args:
        costs: without tensors.
        wanted: those that are to be measured, without formats.
        path: the file.

    Raises:
        ValueError: it holds something else.
    """
    if not path.exists():
        return costs
    there = read_costs(path)
    if found := there.difference(costs):
        raise ValueError(
            f"{path} is of other settings ({found}); choose another file, or delete it"
        )
    known = {(one.kind, one.name): one for one in wanted}
    for tensor in there.tensors:
        here = known.get((tensor.kind, tensor.name))
        if here is None:
            raise ValueError(
                f"{path} holds the {tensor.kind} of {tensor.name}, which is not measured now;"
                " measure it as well, or "
                "choose another file"
            )
        if replace(here, formats=tensor.formats) != tensor:
            raise ValueError(
                f"{path} holds the {tensor.kind} of {tensor.name} with {_told(tensor)}, but it has"
                f" {_told(here)}; "
                "choose another file, or delete it"
            )
    return replace(there, finished=False)


def _told(tensor: TensorCosts) -> str:
    return f"shape={list(tensor.shape)}, values={tensor.values}, transposed={tensor.transposed}"


@contextlib.contextmanager
def _still(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this context the model is in eval mode, its weights have gradients, and clips stay
    with any weights."""
    before = [(module, module.training) for module in model.modules()]
    wanted = {weight: True for weight in weights}
    for module, _ in before:
        if isinstance(module, ProgramModule):
            wanted |= dict.fromkeys(module.clips().values(), False)
    changed = [parameter for parameter, has in wanted.items() if parameter.requires_grad != has]
    model.eval()
    for parameter in changed:
        parameter.requires_grad_(wanted[parameter])
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not wanted[parameter])
        for module, training in before:  # a module before those in it
            module.train(training)


@contextlib.contextmanager
@torch.no_grad()
def _replaced(weight: nn.Parameter, values: Tensor) -> Iterator[None]:
    """Within this context a weight holds other values."""
    before = weight.detach().clone()
    try:
        weight.copy_(values)
        yield
    finally:
        weight.copy_(before)
