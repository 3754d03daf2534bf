"""Errors of every format in every tensor."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lsq.config import require_whole
from lsq.quant.numbers import METHODS, PRESETS, ScaledFormat, scaled_format, signal_to_noise
from lsq.quant.numbers.clips import PERCENTILE
from lsq.study.products import gather
from lsq.study.table import Entry, Error, Errors
from lsq.study.tensors import LARGEST_SAMPLE, WEIGHT, Sample, as_rows, chosen_by, take, weights_of

OTHER_NAMES = {"int8-tensor": "int8/tensor", "int8-row": "int8/row", "nf4-64": "nf4/group64"}
"""Presets that are shown as formats without a name of their own are."""
DEFAULT_FORMATS = (
    *(OTHER_NAMES.get(name, name) for name in PRESETS),
    *(f"int{bits}/row" for bits in range(2, 8)),
    *("int4/group32", "fp8-e4m3/row", "log4.3/row", "log5.2/row", "ternary/row"),
)


def measure(
    model: nn.Module,
    run: Callable[[], Tensor | None],
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    clip: str = "absmax",
    percentile: float = PERCENTILE,
    tensors: Iterable[str] = (),
    sample: int = LARGEST_SAMPLE,
    quiet: bool = True,
) -> Errors:
    """Errors of formats in the weights of a model, in what its products read, and in the gradients
    of what they give.

    The model computes as it does in floats and in eval mode, modules of lsq too, whatever they are
    rounded to; clips and schedules are not touched, and gradients of parameters are afterwards what
    they were.

    Args:
        model: any. Products are those of linear layers and convolutions of PyTorch, of torch.addmm
            (GPT-2's Conv1D), of multi-head attention's projections, and of lsq's programs; of each
            weight the first one counts.
        run: computes something with the model, such as the loss of a batch; of a scalar tensor that
            it returns, the gradient is computed. Without one there are no gradients.
        formats: names for lsq.quant.numbers.scaled_format.
        clip, percentile: how clips are measured, see ScaledFormat.encode.
        tensors: patterns with * and ? of names of weights, by which tensors are called; none: all.
        sample: values that are looked at of a large tensor.
        quiet: no progress bar.

    Raises:
        ValueError: a format, a method or a pattern is wrong, `run` returns something else, or the
            model has no weight.
    """
    forms = _checked(formats, clip, percentile, sample)
    found = _errors(gather(model, run, tensors, sample), forms, clip, percentile, quiet)
    return replace(found, of_model=True)


def measure_tensors(
    tensors: Mapping[str, Tensor],
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    clip: str = "absmax",
    percentile: float = PERCENTILE,
    chosen: Iterable[str] = (),
    sample: int = LARGEST_SAMPLE,
    quiet: bool = True,
) -> Errors:
    """The same of the float tensors with two dimensions or more in a state dict; `chosen` are
    patterns of names.

    Raises:
        ValueError: a format, a method or a pattern is wrong, or there is no such tensor.
    """
    forms = _checked(formats, clip, percentile, sample)
    found = dict(weights_of(tensors))
    if not found:
        raise ValueError(
            "there is no float tensor with two or more dimensions, so nothing to measure"
        )
    names = chosen_by(chosen, found)
    samples = [
        take(name, WEIGHT, as_rows(one), sample) for name, one in found.items() if name in names
    ]
    return _errors(samples, forms, clip, percentile, quiet)


def _checked(
    formats: Sequence[str], clip: str, percentile: float, sample: int
) -> list[ScaledFormat]:
    require_whole("sample", sample)
    if clip not in METHODS:
        raise ValueError(f"clip is {clip!r}; allowed: {', '.join(map(repr, METHODS))}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile!r}; it must be above 0 and at most 100")
    if not formats:
        raise ValueError("formats are none; name one, such as int8/row")
    return [scaled_format(name) for name in dict.fromkeys(formats)]


@torch.no_grad()
def _errors(
    samples: Sequence[Sample],
    forms: Sequence[ScaledFormat],
    clip: str,
    percentile: float,
    quiet: bool,
) -> Errors:
    entries = []
    with tqdm(
        samples, desc="measuring", unit=" tensors", leave=False, disable=quiet or None
    ) as bar:
        for one in bar:
            errors = (
                ()
                if one.problem
                else tuple(error_of(one, form, clip, percentile) for form in forms)
            )
            entries.append(
                Entry(
                    name=one.name,
                    kind=one.kind,
                    shape=one.shape,
                    values=one.values.numel(),
                    problem=one.problem,
                    zero_rows=one.zero_rows,
                    errors=errors,
                )
            )
    return Errors(
        clip=clip,
        percentile=percentile,
        formats=tuple(form.name for form in forms),
        entries=tuple(entries),
    )


def error_of(one: Sample, form: ScaledFormat, clip: str, percentile: float) -> Error:
    """What a format costs a tensor; bits are those of all of it."""
    found = form.decode(form.encode(one.values, clip, percentile=percentile))
    largest = float((found.double() - one.values).abs().max() / one.values.abs().max().double())
    noise = signal_to_noise(one.values, found)
    return Error(
        format=form.name,
        bits=form.bits_per_value(one.shape),
        signal_to_noise=-math.inf if math.isnan(noise) else noise,
        largest=largest,
    )
