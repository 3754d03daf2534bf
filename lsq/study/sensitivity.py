"""Costs of formats in loss for each tensor: measured, one tensor at a time, and estimated.

The divergence is that of the predictions q from those of the model as it is, p: the mean of
sum p log(p / q) in nats (Kullback and Leibler 1951). Unlike a difference of losses, it is never
negative and does not fit the few items that are measured.

The estimate is of second order: a change d of values changes the loss by about g d + 1/2 d H d. H
is the diagonal (LeCun et al. 1989, "Optimal Brain Damage") of the empirical Fisher information
(Martens 2014, arXiv:1412.1193, section 11). For a mean of T negative log-likelihoods in nats, it is
1/T times the sum over samples of squared gradients. A sample should be one sentence. In a batch the
gradients of sentences nearly cancel, so that the square is too small by about their number. With
labels that are drawn from the predictions it is the Fisher information itself, and samples may have
any size.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from lsq.layers.module import ProgramModule
from lsq.quant.arithmetic import SMALLEST_CLIP
from lsq.quant.declared import declared_tables
from lsq.quant.formats import Grain, weight_format
from lsq.quant.numbers import METHODS, ScaledFormat, scaled_format
from lsq.study.costs import Cost, Costs, TensorCosts, read_costs, write_costs
from lsq.study.products import Look, inputs_replaced
from lsq.study.tensors import ACTIVATION, WEIGHT, as_rows, chosen_by, parameters_of

FORMATS = tuple("int8/row int6/row int4/group32 vsquant4 nvfp4 int3/group32 int2/group16".split())
Loss = Callable[[nn.Module, Any], tuple[Tensor, float] | tuple[Tensor, float, Tensor]]
"""(model, batch) -> (the sum of its losses, a scalar with gradients; their number; and, where the
divergence is wanted, the logits [items, classes] of its predictions)."""
LARGEST_PREDICTIONS = 2**28
"""Most logits that are compared with those of the model as it is: 1 GiB of these are kept."""
SEED = 1
"""Seed of each pass: lsq's own layers may round gradients at random."""


INT4 = weight_format("int4", 8, Grain.ROW)
SCALE_BITS = 32
"""Of the scale of a row of INT4."""
OF_WEIGHTS = (INT4.name,)
"""Formats that activations cannot have."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Rounds tensors to a format, and keeps their dtype."""

    form: ScaledFormat | None
    """The format of weights; None: INT4."""
    of_activations: ScaledFormat | None
    clip: str

    @staticmethod
    def of(name: str, clip: str) -> "Rounding":
        """Return the rounding to a format as `weight_format` and `activation_format` name it."""
        if name in OF_WEIGHTS:
            return Rounding(form=None, of_activations=None, clip=clip)
        forms = [scaled_format(f"int8/{g}" if name == "int8" else name) for g in ("row", "tensor")]
        return Rounding(form=forms[0], of_activations=forms[1], clip=clip)

    def weight(self, values: Tensor, transposed: bool) -> Tensor:
        matrix = values.detach().t() if transposed else as_rows(values.detach())
        if self.form is None:
            clips = matrix.abs().amax(1).float().clamp_min(SMALLEST_CLIP)
            codes, scale = INT4.encode(matrix.float(), clips)
            rounded = INT4.unpack(codes, matrix.shape[1]) * scale[:, None]
        else:
            rounded = self.form.decode(self.form.encode(matrix, self.clip))
        return (rounded.t() if transposed else rounded).reshape(values.shape).to(values.dtype)

    def activation(self, values: Tensor) -> Tensor:
        """Round the input [..., K] of a product, with clips at the largest magnitudes."""
        form = self.of_activations
        return form.decode(form.encode(values)).to(values.dtype)

    def bits(self, weight: Tensor, transposed: bool) -> float:
        shape = (weight.t() if transposed else as_rows(weight)).shape
        if self.form is None:
            return (8 * INT4.stored_columns(shape[1]) + SCALE_BITS) / shape[1]
        return self.form.bits_per_value(shape)


@dataclass(kw_only=True)
class Sums:
    """Sums over the values of one tensor in one format."""

    first: float = 0.0
    second: float = 0.0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, values: Tensor, change: Tensor, gradient: Tensor, square: Tensor) -> None:
        """Add values, float64 changes, gradients and squared gradients, all of one shape."""
        self.first += float((gradient * change).sum())
        squares = change.square()
        self.second += float((square * squares).sum())
        self.signal += float(values.double().square().sum())
        self.noise += float(squares.sum())


@dataclass(kw_only=True)
class Gradients:
    """Gradients of a loss, summed over samples."""

    count: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    """Sums over samples of squared gradients."""
    activations: dict[tuple[str, str], Sums] = field(default_factory=dict)
    """By (name of the weight, format)."""


def gradients(
    model: nn.Module,
    loss: Loss,
    samples: Sequence[Any],
    weights: Mapping[str, nn.Parameter],
    activations: Collection[str],
    rounding: Mapping[str, Rounding],
    drawn: bool = False,
) -> Gradients:
    """Compute gradients of `weights`, and of their products' inputs for names in `activations`.

    drawn: of the loss of labels that are drawn from the predictions. ValueError: there are none.
    """

    def zeros() -> dict[str, Tensor]:
        return {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}

    made = Gradients(
        sums=zeros(),
        squares=zeros(),
        activations={(name, form): Sums() for name in activations for form in rounding},
    )
    torch.clear_autocast_cache()  # which may hold casts of weights that have changed
    for number, sample in enumerate(samples):
        read: list[tuple[str, Tensor]] = []

        def look(name: str, x: Tensor, transposed: bool, read=read) -> Tensor:
            if name not in activations:
                return x
            # a tensor for this product alone, since others may read x, too
            own = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            read.append((name, own))
            return own

        seeded = torch.random.fork_rng(devices=[])
        with inputs_replaced(weights, look), torch.inference_mode(False), seeded:
            torch.default_generator.manual_seed(SEED)
            total, count, *logits = loss(model, sample)
            if drawn:
                total = _loss_of_drawn_labels(logits, SEED + number)
            leaves = [*weights.values(), *(x for _, x in read)]
            found = torch.autograd.grad(total, leaves, allow_unused=True)
        made.count += float(count)
        for name, gradient in zip(weights, found, strict=False):
            if gradient is not None:
                made.sums[name] += gradient
                made.squares[name].addcmul_(gradient.float(), gradient.float())
        for (name, x), gradient in zip(read, found[len(weights) :], strict=True):
            if gradient is not None:
                square = gradient.double().square()
                x = x.detach()
                for form, how in rounding.items():
                    change = how.activation(x).double() - x
                    made.activations[name, form].add(x, change, gradient, square)
    return made


def _loss_of_drawn_labels(logits: Sequence[Tensor], seed: int) -> Tensor:
    if not logits:
        raise ValueError(
            "the loss returns no logits, from which labels are drawn; return (sum of losses, their"
            " number, logits [items, classes])"
        )
    predicted = logits[0].float()
    chance = torch.Generator(predicted.device).manual_seed(seed)
    labels = predicted.detach().softmax(1).multinomial(1, generator=chance).flatten()
    return cross_entropy(predicted, labels, reduction="sum")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Where a running measurement is kept and reported."""

    path: Path | None = None
    """File to write after each tensor; tensors in an existing file are not measured again."""
    anew: bool = False
    """Whether to measure all tensors, and replace an existing file after the first."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description of the model and the batches for the result: plain values, as in JSON."""
    progress: Callable[[int, int, str], object] | None = None
    """Called after each tensor with (number of tensors done, number of all tensors, name)."""

    def write(self, costs: Costs) -> None:
        if self.path is not None:
            write_costs(self.path, costs)


def sensitivity(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    samples: Iterable[Any] | None = None,
    formats: Sequence[str] = FORMATS,
    clip: str = "mse",
    tensors: Iterable[str] = (),
    activations: bool = True,
    keep: Keep | None = None,
) -> Costs:
    """Measure costs of formats in weights of two dimensions or more, and in their products' inputs.

    Meanwhile the model is in eval mode, so that nothing is random. Afterwards it is restored bit by
    bit, also after an exception. Activations of lsq's own layers are not seen, since their programs
    round by themselves; the cost of their weights comes on top of this rounding.

    Args:
        model: on any device.
        loss: (model, batch) -> (sum of the batch's losses, a scalar with gradients; their number),
            and perhaps the logits [items, classes] of the predictions, whose divergence is measured
            then. The estimate is for negative log-likelihoods in nats, such as cross-entropy.
        batches: for the measurement; the loss is the mean over all of them.
        samples: for the estimate, best one sentence each; None: the batches.
        formats: names as for QuantConfig.weight_format; "int4" is of weights alone. Blocks lie
            along the dimension that the product sums over.
        clip: how clips of weights are measured; clips of activations are the largest magnitudes.
        tensors: patterns with * and ? of names of weights; none: all.
        activations: whether to measure activations, too.
        keep: where to keep and report the measurement; None: nowhere.

    Raises:
        ValueError: an argument is wrong, a pattern fits nothing, a weight or the loss is not
            finite, the loss differs between equal runs, or the file of `keep` has other settings.
        OSError: that file cannot be written.
    """
    rounding = _roundings(formats, clip)
    for name in OF_WEIGHTS if activations else ():
        if name in rounding:
            raise ValueError(
                f"activations cannot be in {name}: measure weights only, or take int4/group32/uint4"
            )
    batches = list(batches)  # of a loader, which may shuffle them
    samples, keep = batches if samples is None else list(samples), keep or Keep()
    trial = _trial(model, loss, batches, rounding, tensors)
    with still(model, trial.weights.values()):
        before, count = trial.begin()
        again, *_ = trial.measured()
        if not math.isclose(before, again, rel_tol=1e-6):
            raise ValueError(
                f"the same batches have losses of {before:g} and {again:g}; make the loss"
                " deterministic"
            )
        costs = trial.none_yet(keep.about, clip, len(samples))
        costs = replace(costs, loss=before, count=count)
        wanted = [(WEIGHT, name) for name in trial.weights]
        if activations:
            wanted += [(ACTIVATION, name) for name in trial.weights if name in trial.values]
        if keep.path is not None and not keep.anew:
            costs = _resumed(costs, wanted, keep.path)
        done = {(tensor.kind, tensor.name) for tensor in costs.tensors}
        left = [tensor for tensor in wanted if tensor not in done]
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


def estimate(
    model: nn.Module,
    loss: Loss,
    samples: Iterable[Any],
    *,
    formats: Sequence[str] = FORMATS,
    clip: str = "mse",
    tensors: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Costs:
    """Estimate costs of formats in weights, of second order, from labels that are drawn from the
    model's predictions: one pass, forward and backward, for each sample.

    Arguments and errors are those of `sensitivity`; the loss must return logits. Costs and
    divergences are None, so that `sensitivity` does not go on with a file of these.
    """
    samples, rounding = list(samples), _roundings(formats, clip)
    trial = _trial(model, loss, samples, rounding, tensors)
    with still(model, trial.weights.values()):
        before, count = trial.begin()
        found = gradients(model, loss, samples, trial.weights, (), rounding, drawn=True)
        measured = tuple(trial.weight(name, found, None) for name in trial.weights)
    costs = trial.none_yet({**(about or {}), "estimated": True}, clip, len(samples))
    return replace(costs, loss=before, count=count, tensors=measured, finished=True)


def _trial(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    rounding: Mapping[str, Rounding],
    tensors: Iterable[str],
) -> "Trial":
    weights = weights_to_measure(model, tensors)
    return Trial(model=model, loss=loss, batches=batches, weights=weights, rounding=rounding)


def _roundings(formats: Sequence[str], clip: str) -> dict[str, Rounding]:
    if clip not in METHODS:
        raise ValueError(f"clip is {clip!r}; allowed: {', '.join(map(repr, METHODS))}")
    if not formats:
        raise ValueError("there are no formats; name one at least")
    return {name: Rounding.of(name, clip) for name in formats}


def _as_it_is(name: str, x: Tensor, transposed: bool) -> Tensor:
    return x


@dataclass(kw_only=True)
class Trial:
    """A model in eval mode whose tensors are rounded, one at a time."""

    model: nn.Module
    loss: Loss
    batches: Sequence[Any]
    weights: Mapping[str, nn.Parameter]
    rounding: Mapping[str, Rounding]
    values: dict[str, int] = field(default_factory=dict)
    """Name of a weight -> number of values in the inputs of its products."""
    transposed: set[str] = field(default_factory=set)
    predictions: list[Tensor] = field(default_factory=list)
    """Logarithms of the probabilities [items, classes] of the first batches, from the first run."""
    begun: bool = False
    """Whether there was a first run."""

    def look(self, name: str, x: Tensor, transposed: bool) -> Tensor:
        self.values[name] = self.values.get(name, 0) + x.numel()
        if transposed:
            self.transposed.add(name)
        return x

    def none_yet(self, about: Mapping[str, Any], clip: str, samples: int) -> Costs:
        """Return costs without tensors, of a loss that is still unknown."""
        numbers = declared_tables(self.rounding)  # what was measured with others counts no more
        return Costs(
            about={**about, **({"numbers": numbers} if numbers else {})},
            weights=digest_of(self.weights),
            clip=clip,
            formats=tuple(self.rounding),
            loss=0.0,
            count=0.0,
            samples=samples,
        )

    def begin(self) -> tuple[float, float]:
        """Compute the batches for the first time; return (mean loss, number of losses). ValueError:
        it is not finite."""
        before, count, _ = self.measured(self.look)
        if not math.isfinite(before):
            raise ValueError(
                f"the batches have a loss of {before:g}; give a model and batches with a finite one"
            )
        return before, count

    @torch.no_grad()
    def measured(self, look: Look = _as_it_is) -> tuple[float, float, float | None]:
        """Return (mean loss of all batches, number of losses, divergence from the first run or
        None); ValueError if there are no losses."""
        torch.clear_autocast_cache()  # which may hold casts of weights that have changed
        total = count = divergence = 0.0
        first, kept, self.begun = not self.begun, 0, True
        with inputs_replaced(self.weights, look):
            for number, batch in enumerate(self.batches):
                value, items, *logits = self.loss(self.model, batch)
                total, count = total + float(value), count + float(items)
                if first and logits and kept < LARGEST_PREDICTIONS:
                    self.predictions.append(logits[0].float().log_softmax(1))
                    kept += logits[0].numel()
                elif not first and number < len(self.predictions):
                    divergence += _divergence(self.predictions[number], logits[0])
        if not count > 0:
            raise ValueError("the batches have no losses; give some with words to predict")
        items = sum(map(len, self.predictions))
        return total / count, count, divergence / items if items else None

    def weight(self, name: str, found: Gradients, before: float | None) -> TensorCosts:
        """Measure and estimate the costs of a weight's formats; before None: estimate alone."""
        weight, transposed, formats = self.weights[name], name in self.transposed, {}
        values = weight.detach()
        for form, how in self.rounding.items():
            rounded, sums = how.weight(weight, transposed), Sums()
            change = rounded.double() - values.double()
            sums.add(values, change, found.sums[name], found.squares[name])
            cost, divergence = math.nan, None
            if before is not None:
                with _replaced(weight, rounded):
                    loss, _, divergence = self.measured()
                cost = loss - before
            bits = how.bits(weight, transposed)
            formats[form] = _cost(sums, found.count, bits, cost, divergence)
        return self.costs(WEIGHT, name, formats)

    def activation(self, name: str, found: Gradients, before: float) -> TensorCosts:
        formats = {}
        for form, how in self.rounding.items():
            bits = 0.0

            def look(of: str, x: Tensor, transposed: bool, how=how) -> Tensor:
                nonlocal bits
                if of != name:
                    return x
                bits += how.of_activations.total_bits(x.shape)
                return how.activation(x)

            loss, _, divergence = self.measured(look)
            sums, width = found.activations[name, form], bits / self.values[name]
            formats[form] = _cost(sums, found.count, width, loss - before, divergence)
        return self.costs(ACTIVATION, name, formats)

    @contextlib.contextmanager
    def mixes(self) -> Iterator[Callable[[Mapping[str, str], Mapping[str, str]], float]]:
        """Yield a function that returns the divergence with formats of weights and of their
        products' inputs, by the weights' names; infinity if predictions are not finite.

        Between its calls weights stay rounded: only those whose format changes are rounded again.
        """
        floats: dict[str, Tensor] = {}
        forms: dict[str, str | None] = {}

        @torch.no_grad()
        def give(weights: Mapping[str, str]) -> None:
            for name in {**forms, **weights}:
                form, weight = weights.get(name), self.weights[name]
                if form == forms.get(name):
                    continue
                if name not in floats:
                    floats[name] = weight.detach().clone()
                weight.copy_(floats[name])
                if form is not None:
                    weight.copy_(self.rounding[form].weight(weight, name in self.transposed))
                forms[name] = form

        def divergence(weights: Mapping[str, str], inputs: Mapping[str, str]) -> float:
            give(weights)
            return self._divergence(inputs)

        try:
            yield divergence
        finally:
            with torch.no_grad():
                for name, values in floats.items():
                    self.weights[name].copy_(values)

    def _divergence(self, inputs: Mapping[str, str]) -> float:
        def look(name: str, x: Tensor, transposed: bool) -> Tensor:
            return self.rounding[inputs[name]].activation(x) if name in inputs else x

        divergence = self.measured(look)[2]
        if divergence is None:
            raise ValueError("the loss returns no logits, by which mixes are compared")
        return max(divergence, 0.0) if math.isfinite(divergence) else math.inf

    def costs(self, kind: str, name: str, formats: dict[str, Cost]) -> TensorCosts:
        weight = self.weights[name]
        inputs = weight.shape[0 if name in self.transposed else -1]
        return TensorCosts(
            name=name,
            rows=self.values.get(name, 0) // inputs,
            kind=kind,
            shape=tuple(weight.shape),
            transposed=name in self.transposed,
            formats=formats,
            values=weight.numel() if kind == WEIGHT else self.values[name],
        )


def _divergence(before: Tensor, logits: Tensor) -> float:
    """Return the sum over items of the divergence of logits from log probabilities before."""
    now = logits.float().log_softmax(1)
    found = kl_div(now, before, reduction="none", log_target=True)
    found.masked_fill_(before == -math.inf, 0.0)  # of classes that the model rules out
    return float(found.sum(dtype=torch.float64))


def _cost(sums: Sums, count: float, bits: float, cost: float, divergence: float | None) -> Cost:
    measured = divergence is not None and math.isfinite(divergence)
    return Cost(
        bits=bits,
        cost=cost if math.isfinite(cost) else None,
        divergence=max(divergence, 0.0) if measured else None,
        first=sums.first / count,
        second=sums.second / (2 * count),
        error=sums.noise / sums.signal if sums.signal > 0 else 0.0,
    )


def weights_to_measure(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the weights to measure; ValueError if there are none, or a value is not finite."""
    parameters = {name: weight for name, weight in parameters_of(model).items() if weight.numel()}
    chosen = chosen_by(patterns, parameters)
    weights = {name: weight for name, weight in parameters.items() if name in chosen}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} holds infinities or NaN; give a model without")
    return weights


def digest_of(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()


def _resumed(costs: Costs, wanted: Collection[tuple[str, str]], path: Path) -> Costs:
    """Return the costs in a file, or `costs` if there is none; ValueError for other settings."""
    if not path.exists():
        return costs
    read = read_costs(path)
    if different := read.difference(costs):
        raise ValueError(
            f"{path} is of other settings ({different}); choose another file, or delete it"
        )
    for tensor in read.tensors:
        if (tensor.kind, tensor.name) not in wanted:
            raise ValueError(
                f"{path} holds the {tensor.kind} of {tensor.name}, which is not measured now;"
                " measure it as well, or choose another file"
            )
    return replace(read, finished=False)


@contextlib.contextmanager
def still(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Put a model into eval mode in this context; let weights have gradients, and clips none."""
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
        torch.clear_autocast_cache()  # of rounded weights
        for parameter in changed:
            parameter.requires_grad_(not wanted[parameter])
        for module, training in before:  # outer modules come first
            module.train(training)


@contextlib.contextmanager
@torch.no_grad()
def _replaced(weight: nn.Parameter, values: Tensor) -> Iterator[None]:
    before = weight.detach().clone()
    try:
        weight.copy_(values)
        yield
    finally:
        weight.copy_(before)
