"""Codebooks whose entries train: k-means of weights first, then gradients, while codes stay.

The gradient of an entry is the sum over the weights that have it, each times its scale (Han et al.
2016, arXiv:1510.00149). The loss is the divergence from the model's own predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, pad

from lsq.quant.declared import check_name, declare
from lsq.quant.numbers import NUMBER_FORMATS, FloatScales, ScaledFormat, scaled_format
from lsq.quant.tables import NumberFormat
from lsq.study.sensitivity import Loss, Trial, gradients, still, weights_to_measure
from lsq.study.tensors import LARGEST_SAMPLE, as_rows

ITERATIONS = 200
"""Most iterations of k-means."""
STEP = 0.16
"""First step of Adam times the number of entries, which lie in [-1, 1]; it falls linearly to 0."""


def train_codebooks(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    formats: Mapping[str, str],
    *,
    bits: int = 4,
    updates: int = 48,
) -> dict[str, Tensor]:
    """Train codebooks of 2^bits entries for weights of a model, and declare their numbers.

    The formats may then be named as others are. The weights that are returned have values of their
    formats: rounded again with clips by absmax (QuantConfig.clip_init) they stay as they are. A
    model's own weights are rounded to the nearest entry, which gains little. Meanwhile the model is
    in eval mode; afterwards it is restored bit by bit. On the CPU equal calls give equal entries.

    Args:
        model: on any device.
        loss: as for lsq.study.sensitivity; it returns logits, too.
        batches: one for each update, in turn.
        formats: patterns with * and ? of names of weights -> formats with numbers under names of
            yours: {"*": "mine/row"}, {"*fc1*": "a/group64", "*fc2*": "b/group64/bfloat16"}. The
            last that fits counts. Weights of one number share its entries; scales are floats.
            lsq.convert wants one format for all weights of a product (lsq.study.weight_groups).
        bits: 2 to 6.
        updates: 0: the entries are those of k-means.

    Returns:
        Name -> rounded weight, for `load_state_dict(..., strict=False)`.

    Raises:
        ValueError: an argument is wrong, a name is taken, a pattern fits nothing, a weight is not
            finite, the loss returns no logits, or entries came too close to each other.
    """
    if bits not in range(2, 7):
        raise ValueError(f"bits is {bits!r}; a codebook that trains has 2 to 6")
    if not formats:
        raise ValueError("formats are none; give one, such as {'*': 'mine/row'}")
    forms = {form: _form(form) for form in formats.values()}
    weights = weights_to_measure(model, formats)
    trial = Trial(model=model, loss=loss, batches=batches, weights=weights, rounding={})

    def divergence(model: nn.Module, batch: int) -> tuple[Tensor, float]:
        now = loss(model, batches[batch])[2].float().log_softmax(1)
        return kl_div(now, trial.predictions[batch], reduction="sum", log_target=True), len(now)

    with still(model, weights.values()), torch.no_grad():
        trial.measured(trial.look)
        if not trial.predictions:
            raise ValueError("the loss returns no logits, whose divergence the entries learn from")
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        parts = {
            name: _Part.of(weight, forms[_last_fitting(formats, name)], name in trial.transposed)
            for name, weight in kept.items()
        }
        entries = {
            number: _kmeans([part for part in parts.values() if part.number == number], 2**bits)
            for number in dict.fromkeys(part.number for part in parts.values())
        }
        codes = {
            name: _table(part.number, entries[part.number]).encode(part.steps)
            for name, part in parts.items()
        }
        optimizer = torch.optim.Adam(entries.values(), lr=STEP / 2**bits)

        def rounded(name: str) -> Tensor:
            part, weight = parts[name], kept[name]
            found = _table(part.number, entries[part.number]).decode(codes[name]) * part.scale
            return (found.t() if part.transposed else found).reshape(weight.shape).to(weight.dtype)

        try:
            for update in range(updates):
                for name, weight in weights.items():
                    weight.copy_(rounded(name))
                batch = update % len(trial.predictions)
                found = gradients(model, divergence, [batch], weights, (), {})
                optimizer.zero_grad()
                for name, part in parts.items():
                    gradient = _rows(found.sums[name], part.transposed) * part.scale / found.count
                    sums = _sums(codes[name], gradient, 2**bits)
                    sums[[0, -1]] = 0.0
                    values = entries[part.number]
                    values.grad = sums if values.grad is None else values.grad + sums
                optimizer.param_groups[0]["lr"] = STEP / 2**bits * (1 - update / updates)
                optimizer.step()
                for values in entries.values():
                    values.clamp_(-1.0, 1.0)
        finally:
            for name, weight in weights.items():
                weight.copy_(kept[name])
        for number, values in entries.items():
            declare(number, values)
        return {name: rounded(name) for name in weights}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A weight [R, C], its scales along C."""

    number: str
    transposed: bool
    """Whether the weight itself is [C, R]."""
    scale: Tensor
    steps: Tensor
    """Values over scales, float32 [R, C], from -1 to 1."""

    @staticmethod
    def of(weight: Tensor, form: ScaledFormat, transposed: bool) -> "_Part":
        rows = _rows(weight, transposed).float()
        shape = tuple(rows.shape)
        scale = form.grain.spread(form.scales.decode(form.encode(rows).scales), shape)
        steps = torch.where(scale == 0, 0.0, rows / scale)
        return _Part(number=form.number.name, transposed=transposed, scale=scale, steps=steps)


def _form(name: str) -> ScaledFormat:
    """Return a format whose scale is the largest magnitude, its number yet without entries."""
    number, _, rest = name.partition("/")
    check_name(number)
    if number in NUMBER_FORMATS:
        raise ValueError(f"{number} is declared already; choose another name")
    if not rest:
        raise ValueError(f"{name!r} does not say which values share a scale; give {name}/row")
    form = scaled_format(f"int8/{rest}")
    if not isinstance(form.scales, FloatScales):
        raise ValueError(f"{name!r}: scales of a codebook that trains are float32 or bfloat16")
    return replace(form, name=name, number=NumberFormat(name=number, values=(-1.0, 1.0)))


def _last_fitting(formats: Mapping[str, str], name: str) -> str:
    return [form for pattern, form in formats.items() if fnmatchcase(name, pattern)][-1]


def _rows(weight: Tensor, transposed: bool) -> Tensor:
    return weight.t() if transposed else as_rows(weight)


def _table(name: str, entries: Tensor) -> NumberFormat:
    return NumberFormat(name=name, values=tuple(entries.tolist()))


def _sums(codes: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the sum of the values of each code, float64 on the CPU, where the order is fixed."""
    return torch.bincount(codes.flatten().cpu(), values.flatten().double().cpu(), minlength=count)


def _kmeans(parts: Sequence[_Part], count: int) -> Tensor:
    """Return entries float64 [count] of least squared error for values over their scales. The first
    is -1 and the last 1, so that the largest value of a block keeps its magnitude."""
    samples = [part.steps[:: -(-part.steps.numel() // LARGEST_SAMPLE)] for part in parts]
    x = torch.cat([one.flatten() for one in samples]).double().cpu().sort().values
    sums = pad(x.cumsum(0), (1, 0))
    values = torch.linspace(-1, 1, count, dtype=torch.float64)
    for _ in range(ITERATIONS):
        edges = torch.searchsorted(x, (values[1:] + values[:-1]) / 2)
        ends = pad(pad(edges, (1, 0)), (0, 1), value=len(x))
        sizes, before = ends.diff(), values
        values = torch.where(sizes > 0, sums[ends].diff() / sizes.clamp(min=1), values)
        values[0], values[-1] = -1.0, 1.0
        if torch.equal(values, before):
            break
    return values
