"""Searches for formats whose mixes are measured with the model itself."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lsq.files import json_file
from lsq.files.json_file import check_text, shown
from lsq.quant.declared import declared_tables
from lsq.study.allocation import Allocation, Allocator
from lsq.study.costs import check_finite
from lsq.study.knapsack import Problem
from lsq.study.proposals import Measure, Picked, evolve, random_search
from lsq.study.refinement import refine
from lsq.study.reinforcement import ddpg, td3
from lsq.study.resources import Budget
from lsq.study.sensitivity import Loss, Rounding, Trial, digest_of, still, weights_to_measure
from lsq.study.tensors import ACTIVATION, WEIGHT

FORMAT, VERSION = "lsq-mixes", 2
REMEDY = "choose another file, or delete it and measure again"
LARGEST = 1e30
"""Divergence of a mix whose predictions are not finite."""
FIRST = ("divergence", "second")
Method = Callable[[Problem, Picked, Measure, int], None]
SEARCHES: dict[str, Method] = {
    "refine": refine,
    "evolve": evolve,
    "random": random_search,
    "ddpg": ddpg,
    "td3": td3,
}
"""Methods that measure mixes: (problem, first mix, measure, seed)."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """One measured mix."""

    formats: str
    """Formats of the units, in their order, with commas."""
    divergence: float

    def __post_init__(self) -> None:
        for name in self.formats.split(","):
            check_text("formats", name)
        check_finite("divergence", self.divergence)


@dataclass(frozen=True, kw_only=True)
class KeptMixes:
    """Where measured mixes are kept and reported."""

    path: Path | None = None
    """File to write after each mix; mixes in an existing file are not measured again."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description of the model and the batches: plain values, as in JSON."""
    progress: Callable[[int, float], object] | None = None
    """Called after each mix with (number of mixes, least divergence so far)."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best mix that was measured; costs in allocations are still those of single tensors."""

    allocation: Allocation
    divergence: float
    first: float
    """Divergence of the mix that the search began with."""
    mixes: int
    """Number of mixes that were compared."""
    held_out: dict[str, float]
    """"mix", and names of the uniform formats that fit -> divergence on batches that were held out,
    if any."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How mixes are searched for; ValueError for a wrong field."""

    method: str = "refine"
    """A key of SEARCHES."""
    rule: str = "divergence"
    """Of the costs that lsq.allocate makes the first mix from: "divergence", measured for one
    tensor after the other, or "second", estimated in one pass."""
    mixes: int = 400
    """Most mixes to measure."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("method", SEARCHES), ("rule", FIRST)):
            given = getattr(self, name)
            if given not in allowed:
                raise ValueError(f"{name} is {given!r}; allowed: {', '.join(map(repr, allowed))}")
        if self.mixes < 1:
            raise ValueError(f"{self.mixes} mixes shall be measured; give 1 at least")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")


def search(
    allocator: Allocator,
    budget: Budget,
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    how: Search | None = None,
    held_out: Iterable[Any] = (),
    keep: KeptMixes | None = None,
) -> Found:
    """Search for a better mix than the allocator's, with the model itself.

    Meanwhile the model is in eval mode. Afterwards it is restored bit by bit.

    Args:
        allocator: with the costs of this model.
        model, loss, batches: as for lsq.study.sensitivity; the loss returns logits, too.
        held_out: further batches. Where the best mix loses more on them than uniform formats that
            fit and are allowed, these are the result.
        keep: where to keep and report mixes; None: nowhere.

    Raises:
        ValueError: an argument is wrong, nothing fits, the model has other weights than those that
            were measured, or the file of `keep` is of other settings.
        OSError: that file cannot be written.
    """
    batches, held_out = list(batches), list(held_out)  # of a loader, which may shuffle them
    how, costs = how or Search(), allocator.costs
    problem, start = allocator.solved(budget)
    weights = weights_to_measure(model, [tensor.name for tensor in costs.tensors])
    if digest_of(weights) != costs.weights:
        raise ValueError(
            "the model has other weights than those whose costs were measured; give the same model"
        )
    numbers, measured = declared_tables(costs.formats), costs.about.get("numbers", {})
    if numbers != measured:
        raise ValueError(
            f"{', '.join(numbers | measured)} had other values when the costs were measured, or is"
            " not declared now; declare it as it was (--import), or measure again"
        )
    rounding = {name: Rounding.of(name, costs.clip) for name in costs.formats}

    def trial(batches: Sequence[Any]) -> tuple[Trial, float]:
        made = Trial(model=model, loss=loss, batches=batches, weights=weights, rounding=rounding)
        return made, made.begin()[0]

    with still(model, weights.values()):
        begun, before = trial(batches)
        with begun.mixes() as measure:
            mixes = _Mixes(allocator, problem, measure, before, how.mixes, keep or KeptMixes())
            first = mixes(start)
            with contextlib.suppress(_Finished):
                SEARCHES[how.method](problem, start, mixes, how.seed)
        if mixes.least >= LARGEST:
            raise ValueError(
                f"predictions are not finite with any of {len(mixes.seen)} mixes; give larger"
                " formats, or a model whose predictions are finite"
            )
        best = allocator.allocation(problem, mixes.best)
        found, against = {}, {"mix": best}
        if held_out:
            against |= {
                name: one
                for name, one in allocator.uniform().items()
                if one.fits(budget) and allocator.allows(one)
            }
            with trial(held_out)[0].mixes() as measure:
                found = {name: divergence_of(measure, one) for name, one in against.items()}
    least = min(found, key=found.get, default="mix")
    chosen = against[least] if found and found[least] < found["mix"] else best
    return Found(
        allocation=chosen,
        divergence=mixes.least,
        first=first,
        mixes=len(mixes.seen),
        held_out=found,
    )


def divergence_of(measure: Callable[..., float], allocation: Allocation) -> float:
    """Return the divergence with an allocation, of Trial.mixes; LARGEST if it is not finite."""
    found = measure(allocation.of(WEIGHT), allocation.of(ACTIVATION))
    return found if math.isfinite(found) else LARGEST


class _Finished(Exception):
    """No more mixes may be measured."""


class _Mixes:
    """Measures mixes, each once."""

    def __init__(
        self,
        allocator: Allocator,
        problem: Problem,
        measure: Callable[..., float],
        loss: float,
        most: int,
        keep: KeptMixes,
    ):
        """`loss`: of the model as it is."""
        costs = allocator.costs
        self._allocator, self._problem, self._measure = allocator, problem, measure
        self._most, self._keep = most, keep
        self._head = {
            "format": FORMAT,
            "version": VERSION,
            "about": dict(keep.about),
            "weights": costs.weights,
            "clip": costs.clip,
            "numbers": declared_tables(costs.formats),
            "loss": loss,
            "units": [[[part.kind, *part.names] for part in unit] for unit in allocator.units],
        }
        self._measured = self._read()
        self.seen: dict[str, None] = {}
        """The mixes of this search, also those that an earlier one has measured."""
        self.best: Picked = ()
        """The mix that fits and whose divergence is least."""
        self.least = math.inf

    def __call__(self, mix: Picked) -> float:
        """Return the divergence of a mix; LARGEST if it is not finite."""
        items = zip(self._problem.items, mix, strict=True)
        key = ",".join(item.choices[one].name for item, one in items)
        if key not in self.seen:
            if len(self.seen) >= self._most:
                raise _Finished
            self.seen[key] = None
        anew = key not in self._measured
        if anew:
            allocation = self._allocator.allocation(self._problem, mix)
            self._measured[key] = divergence_of(self._measure, allocation)
        divergence = self._measured[key]
        if divergence < self.least and self._problem.fits(mix):
            self.best, self.least = mix, divergence
        if anew:
            self._write()
        return divergence

    def _write(self) -> None:
        if self._keep.path is not None:
            lines = [{"formats": key, "divergence": one} for key, one in self._measured.items()]
            json_file.write(self._keep.path, self._head, "mixes", lines)
        if self._keep.progress is not None:
            self._keep.progress(len(self.seen), self.least)

    def _read(self) -> dict[str, float]:
        path = self._keep.path
        if path is None or not path.exists():
            return {}
        return json_file.read(path, self._of_file, REMEDY)

    def _of_file(self, content: Any) -> dict[str, float]:
        fields = dict(content) if isinstance(content, dict) else {}
        mixes = fields.pop("mixes", None)
        for name, value in self._head.items():
            given = fields.get(name)
            near = name == "loss" and isinstance(given, float)  # losses may differ by rounding
            if given != value and not (near and math.isclose(given, value, rel_tol=1e-5)):
                raise ValueError(f"{name} is {shown(given)}; now it is {shown(value)}")
        made = json_file.sequence(mixes, "mixes", lambda one, at: json_file.record(Mix, one, at))
        return {mix.formats: mix.divergence for mix in made}
