"""Formats that are measured together, near an allocation: costs of single tensors add up roughly.

In a mix of formats each group of weights gets the next smaller and the next larger format in turn,
and the divergence of the model is measured. From these the knapsack makes the next mix, in which
some groups may change: all at first, and half as many after each mix that is no better. At last
come exchanges of bits between two groups, the most promising first.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lsq.files import json_file
from lsq.files.json_file import check_text, shown
from lsq.quant.numbers import scaled_format
from lsq.study.allocation import Allocation, Allocator
from lsq.study.costs import check_finite
from lsq.study.knapsack import Choice, Item, Problem, exact
from lsq.study.sensitivity import Loss, Rounding, Trial, digest_of, still, weights_to_measure

FORMAT, VERSION = "lsq-refinement", 1
REMEDY = "choose another file, or delete it and measure again"
LARGEST = 1e30
"""Divergence of a mix whose predictions are not finite."""
EXCHANGES = 48
"""Most exchanges to measure around a mix."""
BETTER = 1e-6
"""By which share a divergence must fall to count as better."""
Picked = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """One measured mix."""

    formats: str
    """Formats of the groups, in their order, with commas."""
    divergence: float

    def __post_init__(self) -> None:
        check_text("formats", self.formats)
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
class Refined:
    """The best mix that was measured; costs in `allocation` are still those of single tensors."""

    allocation: Allocation
    divergence: float
    begun: float
    """Divergence of the mix that the search began with."""
    mixes: int
    """Number of mixes that were compared."""


def refine(
    allocator: Allocator,
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    *,
    bits: float | None = None,
    bytes: float | None = None,
    mixes: int = 400,
    keep: KeptMixes | None = None,
) -> Refined:
    """Search near the allocation of a budget, and near uniform formats, with the model itself.

    Meanwhile the model is in eval mode. Afterwards it is restored bit by bit.

    Args:
        allocator: with the costs of this model.
        model, loss, batches: as for lsq.study.sensitivity; the loss returns logits, too.
        bits, bytes: as for Allocator.run.
        mixes: most mixes to measure.
        keep: where to keep and report them; None: nowhere.

    Raises:
        ValueError: an argument is wrong, nothing fits, the model has other weights than those that
            were measured, or the file of `keep` is of other settings.
        OSError: that file cannot be written.
    """
    if mixes < 1:
        raise ValueError(f"{mixes} mixes shall be measured; give 1 at least")
    costs, limit = allocator.costs, allocator.limit(bits=bits, bytes=bytes)
    begin = allocator.run(bits=bits, bytes=bytes)
    weights = weights_to_measure(model, [tensor.name for tensor in costs.tensors])
    if digest_of(weights) != costs.weights:
        raise ValueError(
            "the model has other weights than those whose costs were measured; give the same model"
        )
    rounding = {name: Rounding(form=scaled_format(name), clip=costs.clip) for name in costs.formats}
    trial = Trial(model=model, loss=loss, batches=batches, weights=weights, rounding=rounding)
    with still(model, weights.values()):
        if trial.measured(trial.look)[2] is None:
            raise ValueError("the loss returns no logits, which mixes are compared by")
        search = _Search(allocator, trial, limit, mixes, keep or KeptMixes())
        best = search.run(begin)
    return Refined(
        allocation=allocator.allocation(best),
        divergence=search.measured[search.key(best)],
        begun=search.measured[search.key(search.picked(begin))],
        mixes=len(search.seen),
    )


class _Finished(Exception):
    """No more mixes may be measured."""


class _Search:
    def __init__(
        self, allocator: Allocator, trial: Trial, limit: float, most: int, keep: KeptMixes
    ):
        self.groups, self.items = allocator.measured_groups, allocator.problem(limit).items
        self.problem = allocator.problem(limit)
        self._trial, self._limit, self._most, self._keep = trial, limit, most, keep
        self._head = {
            "format": FORMAT,
            "version": VERSION,
            "about": dict(keep.about),
            "weights": allocator.costs.weights,
            "groups": [list(group) for group in self.groups],
        }
        self.measured: dict[str, float] = self._read()
        self.seen: dict[str, None] = {}
        """The mixes of this search, also those that an earlier one has measured."""

    def run(self, begin: Allocation) -> Picked:
        """Return the best mix that was measured."""
        self.best = self.picked(begin)
        least = self.measure(self.best)
        try:
            for uniform in self._uniform():
                if self.measure(uniform) < least:
                    self.best, least = uniform, self.measure(uniform)
            while self._step():
                pass
        except _Finished:
            pass
        return self.best

    def _step(self) -> bool:
        """Measure around the best mix and replace it; False: nothing near it is better."""
        least, near = self.measure(self.best), self._around()
        changes = len(self.groups)
        tried = []
        while changes:
            tried.append(self._next(near, changes))
            changes //= 2
        for mix in (*tried, *self._exchanges(near)):
            if mix is not None and self.measure(mix) < least * (1 - BETTER):
                self.best = mix
                return True
        return False

    def _around(self) -> list[dict[int, float]]:
        """Return for each group, choice -> divergence of the best mix with it."""
        found, best = [], self.best
        for number, item in enumerate(self.items):
            order = sorted(range(len(item.choices)), key=lambda one: item.choices[one].takes)
            at = order.index(best[number])
            mixes = {
                one: (*best[:number], one, *best[number + 1 :])
                for one in order[max(at - 1, 0) : at + 2]
            }
            found.append({one: self.measure(mix) for one, mix in mixes.items()})
        return found

    def _next(self, near: list[dict[int, float]], changes: int) -> Picked | None:
        """Return the mix of the least sum of divergences in which few groups change."""
        numbers = [sorted(choices) for choices in near]
        items = [
            Item(
                name=item.name,
                choices=tuple(
                    Choice(
                        name=item.choices[one].name,
                        cost=choices[one] - choices[now],
                        takes=(*item.choices[one].takes, float(one != now)),
                    )
                    for one in each
                ),
            )
            for item, choices, each, now in zip(self.items, near, numbers, self.best, strict=True)
        ]
        found = exact(Problem(items=tuple(items), budgets=(self._limit, float(changes))))
        if found is None:
            return None
        return tuple(each[one] for each, one in zip(numbers, found, strict=True))

    def _exchanges(self, near: list[dict[int, float]]) -> list[Picked]:
        """Return the best mix with one or two groups changed, the least sums first."""
        changes = [
            (number, one, divergence - choices[self.best[number]])
            for number, choices in enumerate(near)
            for one, divergence in choices.items()
            if one != self.best[number]
        ]
        pairs = itertools.chain(
            ((change,) for change in changes), itertools.combinations(changes, 2)
        )
        found = []
        for pair in sorted(pairs, key=lambda pair: sum(one[2] for one in pair)):
            mix = list(self.best)
            for number, one, _ in pair:
                mix[number] = one
            if self.problem.fits(mix):
                found.append(tuple(mix))
            if len(found) == EXCHANGES:
                break
        return found

    def _uniform(self) -> list[Picked]:
        """Return the mixes of one format that fit."""
        names = dict.fromkeys(choice.name for item in self.items for choice in item.choices)
        every = []
        for name in names:
            found = [[n for n, c in enumerate(i.choices) if c.name == name] for i in self.items]
            if all(found) and self.problem.fits([one[0] for one in found]):
                every.append(tuple(one[0] for one in found))
        return every

    def measure(self, mix: Picked) -> float:
        """Return the divergence of a mix; LARGEST if it is not finite."""
        key = self.key(mix)
        if key not in self.seen:
            if len(self.seen) >= self._most:
                raise _Finished
            self.seen[key] = None
        if key in self.measured:
            return self.measured[key]
        with self._trial.rounded(self._formats(mix)):
            divergence = self._trial.measured()[2]
        if divergence is None or not math.isfinite(divergence):
            divergence = LARGEST
        self.measured[key] = max(divergence, 0.0)
        self._write()
        return self.measured[key]

    def picked(self, allocation: Allocation) -> Picked:
        """Return the numbers of an allocation's choices."""
        return tuple(
            [choice.name for choice in item.choices].index(one.format)
            for item, one in zip(self.items, allocation.chosen, strict=True)
        )

    def key(self, mix: Picked) -> str:
        return ",".join(i.choices[one].name for i, one in zip(self.items, mix, strict=True))

    def _formats(self, mix: Picked) -> dict[str, str]:
        return {
            name: item.choices[one].name
            for group, item, one in zip(self.groups, self.items, mix, strict=True)
            for name in group
        }

    def _write(self) -> None:
        if self._keep.path is not None:
            lines = [{"formats": key, "divergence": one} for key, one in self.measured.items()]
            json_file.write(self._keep.path, self._head, "mixes", lines)
        if self._keep.progress is not None:
            self._keep.progress(len(self.seen), min(map(self.measured.get, self.seen)))

    def _read(self) -> dict[str, float]:
        path = self._keep.path
        if path is None or not path.exists():
            return {}
        return json_file.read(path, self._mixes, REMEDY)

    def _mixes(self, content: Any) -> dict[str, float]:
        fields = dict(content) if isinstance(content, dict) else {}
        mixes = fields.pop("mixes", None)
        for name, value in self._head.items():
            if fields.get(name) != value:
                raise ValueError(f"{name} is {shown(fields.get(name))}; now it is {shown(value)}")
        made = json_file.sequence(mixes, "mixes", lambda one, at: json_file.record(Mix, one, at))
        return {mix.formats: mix.divergence for mix in made}
