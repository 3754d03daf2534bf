"""Errors as figures: of each tensor, their medians over tensors of a kind, as text and for JSON."""

import math
import statistics
from dataclasses import dataclass

import lsq
from lsq.study.bounds import gaussian
from lsq.study.tables import UNLIMITED, fitted
from lsq.study.tensors import ACTIVATION, KINDS, WEIGHT

SCHEMA = "lsq formats 1"
SHOWN = 5
"""Names in a list."""
COLUMNS = ("format", "bits", "SNR, dB", "least, dB", "to Gaussian's limit, dB", "largest error")
PLURALS = {"weight": "weights", "activation": "activations", "gradient": "gradients"}


@dataclass(frozen=True, kw_only=True)
class Error:
    """What a format costs a tensor."""

    format: str
    bits: float
    """Per value, scales counted."""
    signal_to_noise: float
    """In dB; infinite where nothing differs."""
    largest: float
    """The largest difference, in parts of the largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor and what each format costs it."""

    name: str
    kind: str
    shape: tuple[int, int]
    values: int
    """How many were looked at."""
    problem: str | None
    """Why nothing could be measured."""
    zero_rows: int
    errors: tuple[Error, ...]

    @property
    def sampled(self) -> bool:
        """Whether less was looked at than all of it but rows of zeros."""
        return self.values < (self.shape[0] - self.zero_rows) * self.shape[1]


@dataclass(frozen=True, kw_only=True)
class Median:
    """A format over all tensors of a kind."""

    format: str
    bits: float
    signal_to_noise: float
    least: float
    """The least signal-to-noise."""
    where: str
    """The name of that tensor."""
    largest: float


@dataclass(frozen=True, kw_only=True)
class Errors:
    """What formats cost the tensors of a model; `print` shows medians."""

    clip: str
    percentile: float
    formats: tuple[str, ...]
    entries: tuple[Entry, ...]
    of_model: bool = False
    """Whether a model was running, so that there may be activations."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those with something measured."""
        return tuple(kind for kind in KINDS if self._measured(kind))

    def medians(self, kind: str) -> list[Median]:
        """One for each format, by bits; nothing where no tensor of the kind was measured."""
        entries = self._measured(kind)
        found = []
        for number, name in enumerate(self.formats if entries else ()):
            errors = [entry.errors[number] for entry in entries]
            worst = min(range(len(entries)), key=lambda i, errors=errors: errors[i].signal_to_noise)
            found.append(
                Median(
                    format=name,
                    bits=statistics.median(error.bits for error in errors),
                    signal_to_noise=statistics.median_low(
                        [error.signal_to_noise for error in errors]
                    ),
                    least=errors[worst].signal_to_noise,
                    where=entries[worst].name,
                    largest=statistics.median(error.largest for error in errors),
                )
            )
        return sorted(found, key=lambda one: (one.bits, -one.signal_to_noise))

    def table(self, style: str = "simple") -> str:
        """Medians of each kind and what else there is to say.

        Args:
            style: of tabulate ("github" is Markdown, for files).
        """
        parts, width = [], UNLIMITED if style == "github" else None
        for kind in self.kinds:
            entries = self._measured(kind)
            rows = [
                (
                    one.format,
                    f"{one.bits:.2f}",
                    f"{one.signal_to_noise:.1f}",
                    f"{one.least:.1f}",
                    f"{gaussian(one.bits) - one.signal_to_noise:.1f}",
                    f"{one.largest:.2%}",
                )
                for one in self.medians(kind)
            ]
            made = fitted(rows, COLUMNS, ("left", *("right",) * 5), style=style, width=width)
            parts.append(
                f"{PLURALS[kind]}: medians of {len(entries)}, clips by {self.clip}\n\n{made}"
            )
        return "\n\n".join([*parts, *filter(None, ["\n".join(self.remarks())])])

    def remarks(self) -> list[str]:
        """What was not measured, and what to know of the rest."""
        said = [
            f"not measured: {one.kind} {one.name}: {one.problem}"
            for one in self.entries
            if one.problem
        ]
        rows = [one for one in self.entries if one.zero_rows and not one.problem]
        if rows:
            named = [f"{one.kind} {one.name} ({one.zero_rows} of {one.shape[0]})" for one in rows]
            said.append(f"rows of zeros, which were left out: {_few(named)}")
        unseen = self._unseen()
        if unseen:
            said.append(f"no product was seen of: {_few(unseen)}")
        sampled = [one for one in self.entries if one.sampled and not one.problem]
        if sampled:
            most = max(one.values for one in sampled)
            said.append(
                f"of {len(sampled)} large tensors evenly spaced rows were looked at, at most"
                f" {most:,} values"
            )
        return said

    def _unseen(self) -> list[str]:
        """Weights that were multiplied with nothing that could be looked at, such as tables of
        words."""
        read = {one.name.partition("[")[0] for one in self.entries if one.kind == ACTIVATION}
        return [
            one.name
            for one in self.entries
            if self.of_model and one.kind == WEIGHT and one.name not in read
        ]

    def to_json(self) -> dict:
        """Plain data. Signal-to-noise is null where nothing differs."""

        def decibels(value: float) -> float | None:
            return None if value == math.inf else value

        return {
            "schema": SCHEMA,
            "lsq": lsq.__version__,
            "clip": self.clip,
            "percentile": self.percentile if self.clip == "percentile" else None,
            "formats": list(self.formats),
            "medians": {
                kind: [
                    {
                        "format": one.format,
                        "bits": one.bits,
                        "signal_to_noise": decibels(one.signal_to_noise),
                        "least": decibels(one.least),
                        "where": one.where,
                        "largest_error": one.largest,
                    }
                    for one in self.medians(kind)
                ]
                for kind in self.kinds
            },
            "tensors": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "shape": list(one.shape),
                    "values": one.values,
                    "zero_rows": one.zero_rows,
                    "problem": one.problem,
                    "errors": [
                        {
                            "format": error.format,
                            "bits": error.bits,
                            "signal_to_noise": decibels(error.signal_to_noise),
                            "largest_error": error.largest,
                        }
                        for error in one.errors
                    ],
                }
                for one in self.entries
            ],
        }

    def _measured(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind and not entry.problem]

    __str__ = table


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
