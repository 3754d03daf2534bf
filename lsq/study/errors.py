"""Errors of number formats in tensors, and limits for independent values of a distribution."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from tqdm import tqdm

import lsq
from lsq.config import require_whole
from lsq.quant.numbers import METHODS, PRESETS, ScaledFormat, scaled_format, signal_to_noise
from lsq.quant.tables import NumberFormat
from lsq.study.products import gather
from lsq.study.tables import UNLIMITED, fitted
from lsq.study.tensors import (
    ACTIVATION,
    KINDS,
    LARGEST_SAMPLE,
    PLURALS,
    WEIGHT,
    Sample,
    as_rows,
    chosen_by,
    take,
    weights_of,
)

OTHER_NAMES = {"int8-tensor": "int8/tensor", "int8-row": "int8/row", "nf4-64": "nf4/group64"}
DEFAULT_FORMATS = (
    *(OTHER_NAMES.get(name, name) for name in PRESETS),
    *(f"int{bits}/row" for bits in range(2, 8)),
    *("int4/group32", "fp8-e4m3/row", "log4.3/row", "log5.2/row", "ternary/row"),
)
SCHEMA = "lsq formats 1"
SHOWN = 5
COLUMNS = ("format", "bits", "SNR, dB", "least, dB", "to Gaussian's limit, dB", "largest error")
DECIBELS_PER_BIT = 20 * math.log10(2)


def gaussian(bits: float) -> float:
    """Return the largest possible SNR in dB of a Gaussian at `bits` a value (Shannon 1959)."""
    return DECIBELS_PER_BIT * bits


def laplacian(bits: float) -> float:
    """Return Shannon's bound for a Laplacian, e / pi 2^(-2 bits), in dB: too high below 2 bits."""
    return DECIBELS_PER_BIT * bits + 10 * math.log10(math.pi / math.e)


BOUNDS: dict[str, Callable[[float], float]] = {"gaussian": gaussian, "laplacian": laplacian}


def worst_error(number: NumberFormat, least: float = 0.0) -> float:
    """Return the largest relative error of rounding to the nearest value, from magnitude `least`.

    It is (b - a) / (b + a) in the middle between neighbours a < b of one sign. Neighbours below
    `least` are left out, and so is what lies between 0 and the smallest magnitude.
    """
    worst = 0.0
    for sign in (1, -1):
        side = {sign * one for one in number.values if math.isfinite(one)}
        magnitudes = sorted(one for one in side if one > 0 and one >= least)
        worst = max([worst, *((b - a) / (b + a) for a, b in itertools.pairwise(magnitudes))])
    return worst


@dataclass(frozen=True, kw_only=True)
class Error:
    """The error of a format in a tensor."""

    format: str
    bits: float
    signal_to_noise: float
    """In dB; infinite if no value changes."""
    largest_error: float
    """Relative to the largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor and the error of each format in it."""

    name: str
    kind: str
    shape: tuple[int, int]
    values: int
    """Number of values in the sample."""
    problem: str | None
    zero_rows: int
    errors: tuple[Error, ...]

    @property
    def sampled(self) -> bool:
        return self.values < (self.shape[0] - self.zero_rows) * self.shape[1]


@dataclass(frozen=True, kw_only=True)
class Median(Error):
    """The error of a format over all tensors of a kind."""

    least: float
    where: str
    """The tensor with the least signal-to-noise ratio."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of formats in tensors; print it for the medians."""

    clip: str
    formats: tuple[str, ...]
    entries: tuple[Entry, ...]
    of_model: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if self._measured(kind))

    def medians(self, kind: str) -> list[Median]:
        entries = self._measured(kind)
        medians = []
        for number, name in enumerate(self.formats if entries else ()):
            errors = [entry.errors[number] for entry in entries]
            worst = min(range(len(errors)), key=[e.signal_to_noise for e in errors].__getitem__)
            medians.append(
                Median(
                    format=name,
                    bits=statistics.median(error.bits for error in errors),
                    signal_to_noise=statistics.median_low(e.signal_to_noise for e in errors),
                    least=errors[worst].signal_to_noise,
                    where=entries[worst].name,
                    largest_error=statistics.median(error.largest_error for error in errors),
                )
            )
        return sorted(medians, key=lambda median: (median.bits, -median.signal_to_noise))

    def table(self, style: str = "simple") -> str:
        """Return tables of medians, and remarks; style "github" is Markdown."""
        parts, width = [], UNLIMITED if style == "github" else None
        for kind in self.kinds:
            rows = [
                (
                    median.format,
                    f"{median.bits:.2f}",
                    f"{median.signal_to_noise:.1f}",
                    f"{median.least:.1f}",
                    f"{gaussian(median.bits) - median.signal_to_noise:.1f}",
                    f"{median.largest_error:.2%}",
                )
                for median in self.medians(kind)
            ]
            table = fitted(rows, COLUMNS, ("left", *("right",) * 5), style=style, width=width)
            count = len(self._measured(kind))
            parts.append(f"{PLURALS[kind]}: medians of {count}, clips by {self.clip}\n\n{table}")
        return "\n\n".join([*parts, *filter(None, ["\n".join(self.remarks())])])

    __str__ = table

    def remarks(self) -> list[str]:
        """Return lines about tensors that were not measured, or only in part."""
        remarks = [
            f"not measured: {entry.kind} {entry.name}: {entry.problem}"
            for entry in self.entries
            if entry.problem
        ]
        measured = [entry for entry in self.entries if not entry.problem]
        zeros = [
            f"{entry.kind} {entry.name} ({entry.zero_rows} of {entry.shape[0]})"
            for entry in measured
            if entry.zero_rows
        ]
        if zeros:
            remarks.append(f"rows of zeros, which were left out: {_few(zeros)}")
        # weights without a visible product, such as tables of words
        read = {e.name.partition("[")[0] for e in self.entries if e.kind == ACTIVATION}
        unseen = [e.name for e in self.entries if e.kind == WEIGHT and e.name not in read]
        if self.of_model and unseen:
            remarks.append(f"no product was seen of: {_few(unseen)}")
        sampled = [entry.values for entry in measured if entry.sampled]
        if sampled:
            remarks.append(
                f"of {len(sampled)} large tensors evenly spaced rows were looked at, at most"
                f" {max(sampled):,} values"
            )
        return remarks

    def to_json(self) -> dict:
        """Return plain data; an infinite signal-to-noise ratio is None."""
        medians = {kind: [asdict(median) for median in self.medians(kind)] for kind in self.kinds}
        tensors = [asdict(entry) for entry in self.entries]
        for found in (*sum(medians.values(), []), *(e for t in tensors for e in t["errors"])):
            for name in found.keys() & {"signal_to_noise", "least"}:
                found[name] = None if found[name] == math.inf else found[name]
        return {
            "schema": SCHEMA,
            "lsq": lsq.__version__,
            "clip": self.clip,
            "formats": list(self.formats),
            "medians": medians,
            "tensors": tensors,
        }

    def _measured(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind and not entry.problem]


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def measure(
    model: nn.Module,
    run: Callable[[], Tensor | None],
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    clip: str = "absmax",
    tensors: Iterable[str] = (),
    sample: int = LARGEST_SAMPLE,
    quiet: bool = True,
) -> Errors:
    """Measure errors of formats in a model's weights, inputs of products, and output gradients.

    The model runs in eval mode and in floats, modules of lsq as well, whatever their formats. Clips
    and schedules do not change; gradients of parameters are restored.

    Args:
        model: any. Its products are those of PyTorch's linear layers, convolutions, torch.addmm
            (GPT-2's Conv1D) and multi-head attention, and of lsq's programs. The first product of
            each weight counts.
        run: runs the model, for example on a batch. If it returns a loss, a scalar tensor,
            gradients are computed and measured.
        formats: names for lsq.quant.numbers.scaled_format.
        clip: how clips are measured, see ScaledFormat.encode.
        tensors: patterns with * and ? of names of weights, which also name activations and
            gradients; none: all.
        sample: about how many values of a large tensor are measured.
        quiet: whether to show no progress bar.

    Raises:
        ValueError: a format, a method or a pattern is wrong, `run` returns something else, or the
            model has no weight.
    """
    forms = _checked(formats, clip, sample)
    errors = _errors(gather(model, run, tensors, sample), forms, clip, quiet)
    return replace(errors, of_model=True)


def measure_tensors(
    tensors: Mapping[str, Tensor],
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    clip: str = "absmax",
    chosen: Iterable[str] = (),
    sample: int = LARGEST_SAMPLE,
    quiet: bool = True,
) -> Errors:
    """Measure errors of formats in float tensors of two dimensions or more in a state dict.

    `chosen`: patterns of names; for the other arguments and errors see `measure`.
    """
    forms = _checked(formats, clip, sample)
    weights = dict(weights_of(tensors))
    if not weights:
        raise ValueError(
            "there is no float tensor with two or more dimensions, so nothing to measure"
        )
    names = chosen_by(chosen, weights)
    samples = [
        take(name, WEIGHT, as_rows(weight), sample)
        for name, weight in weights.items()
        if name in names
    ]
    return _errors(samples, forms, clip, quiet)


def _checked(formats: Sequence[str], clip: str, sample: int) -> list[ScaledFormat]:
    require_whole("sample", sample)
    if clip not in METHODS:
        raise ValueError(f"clip is {clip!r}; allowed: {', '.join(map(repr, METHODS))}")
    if not formats:
        raise ValueError("formats are none; name one, such as int8/row")
    return [scaled_format(name) for name in dict.fromkeys(formats)]


@torch.no_grad()
def _errors(
    samples: Sequence[Sample], forms: Sequence[ScaledFormat], clip: str, quiet: bool
) -> Errors:
    bar = tqdm(samples, desc="measuring", unit=" tensors", leave=False, disable=quiet or None)
    entries = [
        Entry(
            name=sample.name,
            kind=sample.kind,
            shape=sample.shape,
            values=sample.values.numel(),
            problem=sample.problem,
            zero_rows=sample.zero_rows,
            errors=tuple(
                error_of(sample, form, clip) for form in (() if sample.problem else forms)
            ),
        )
        for sample in bar
    ]
    names = tuple(form.name for form in forms)
    return Errors(clip=clip, formats=names, entries=tuple(entries))


def error_of(sample: Sample, form: ScaledFormat, clip: str) -> Error:
    values = sample.values
    rounded = form.decode(form.encode(values, clip))
    noise = signal_to_noise(values, rounded)
    return Error(
        format=form.name,
        bits=form.bits_per_value(sample.shape),
        signal_to_noise=-math.inf if math.isnan(noise) else noise,
        largest_error=float((rounded.double() - values).abs().max() / values.abs().max().double()),
    )
