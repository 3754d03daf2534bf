"""Compares the ways to run one product: checks them exactly, times them in turn, and judges them by
medians of ratios, each within one round.

The ways come from a trial (cublaslt.py, ended.py); nothing here knows of devices.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lsq.gemm.configuration import Configuration, Entry
from lsq.gemm.product_key import ProductKey

FLOAT_ROUNDS = 3
"""Measurements of the float product, which is slow and only for comparison."""
LARGEST_PRODUCT = 2**31
"""Most bytes of operands and result of an entry that is verified: files are not trusted."""


class Trial(Protocol):
    """A product with several sets of operands that are used in turn, together larger than the
    caches. Times are seconds of one run."""

    def candidates(self) -> Sequence[Any]:
        """Return the ways to run the product, the untuned one first. Raises RuntimeError,
        ValueError: the device has none."""

    def fault(self, configuration: Any) -> str | None:
        """Run once and compare with exact arithmetic; say what is wrong, or return None."""

    def seconds(self, configuration: Any, repeats: int) -> float: ...

    def float_seconds(self, repeats: int) -> float:
        """Return the time of the float product that an int8 product replaces."""

    def close(self) -> None: ...


Trials = Callable[[ProductKey], Trial]
"""Makes trials. Raises RuntimeError, ValueError: no such product; MemoryError: no memory."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to measure."""

    rounds: int = 7
    """Measurements of each candidate that stays; medians and spreads need at least 3."""
    final_rounds: int = 11
    """Measurements of the best and the default against each other after that."""
    confirmations: int = 2
    """How often the best must win again on operands at other addresses, which change the times of
    small products."""
    least_gain: float = 0.02
    """The default stays unless another is faster by more than this share and more than the
    spread."""
    seconds: float = 0.01
    """Length of one measurement, which repeats the run."""
    screening: float = 2.0
    """A candidate is dropped if its first run takes this many times as long as the fastest."""
    finalists: int = 24
    """Most candidates after the screening, besides the default."""
    pruning: tuple[float, ...] = (1.5, 1.25, 1.1)
    """After each round, candidates this many times as slow as the best are dropped; the last number
    holds for all later rounds."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The best way to run a product. Times in seconds."""

    configuration: Configuration
    chosen: float
    default: float
    float: float
    spread: float
    """Interquartile range of the chosen way's times, relative to their median."""
    refused: tuple[tuple[Configuration, str], ...]
    """Candidates that do not run or compute wrong results, and why."""
    complete: bool
    """Whether there was time for every candidate."""
    other: float | None = None
    """Best time of the other class of candidates; None: the screening left none."""


def compare(
    trial: Trial,
    candidates: Sequence[Any],
    settings: Settings,
    *,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the best of `candidates`, the first of which is the default.

    A gain is the default's time over the candidate's in the same round, so that clock drift
    cancels. Another candidate is chosen if its median gain exceeds 1 by more than the gains'
    interquartile range and more than `settings.least_gain`. No candidate is begun after `deadline`.
    Raises RuntimeError: the default computes wrong results.
    """
    screened, refused, complete = _screen(trial, candidates, settings, deadline, clock)
    float_repeats = _repeats(trial.float_seconds(1), settings)
    race = _Race(trial, screened, settings)
    for _ in range(settings.rounds):
        race.run_round()
        race.prune()
    final = _Race(
        trial,
        {number: screened[number] for number in {0, race.best(), *race.best_of_kinds()}},
        settings,
    )
    floats = []
    # measured again, since the lowest of many medians is also low by chance
    for number in range(settings.final_rounds):
        final.run_round()
        if number < FLOAT_ROUNDS:
            floats.append(trial.float_seconds(float_repeats))
    best = final.best()
    # the interquartile range of the rounds' gains, relative to 1
    spread = _interquartile(final.gains(best))
    if not final.gain(best) > 1 + max(settings.least_gain, spread):
        best = 0
    return Outcome(
        configuration=candidates[best],
        chosen=final.median(best),
        default=final.median(0),
        float=statistics.median(floats),
        spread=final.spread(best),
        refused=tuple(refused),
        complete=complete,
        other=final.other(best),
    )


def _screen(trial, candidates, settings, deadline, clock):
    """Check and time each candidate once: ({number: (candidate, repeats)}, refused, whether all
    were)."""
    first_times: dict[int, float] = {}
    refused = []
    complete = True
    for number, candidate in enumerate(candidates):
        if number and clock() >= deadline:
            complete = False
            break
        fault = trial.fault(candidate)
        if fault is None:
            first_times[number] = trial.seconds(candidate, 1)
        elif number == 0:
            raise RuntimeError(
                f"the product is wrong as it runs untuned ({candidate}): {fault}; do not use int8"
                " here"
            )
        else:
            refused.append((candidate, fault))
    limit = settings.screening * min(first_times.values())
    ranked = sorted(
        (number for number in first_times if number and first_times[number] <= limit),
        key=first_times.get,
    )
    kept = [0, *ranked[: settings.finalists]]
    runners = {n: (candidates[n], _repeats(first_times[n], settings)) for n in kept}
    return runners, refused, complete


def _repeats(seconds: float, settings: Settings) -> int:
    return max(1, round(settings.seconds / max(seconds, 1e-9)))


class _Race:
    """Candidates that are timed in turn."""

    def __init__(
        self, trial: Trial, runners: dict[int, tuple[Any, int]], settings: Settings
    ) -> None:
        self.trial, self.runners, self.settings = trial, runners, settings
        self.times: dict[int, list[float]] = {number: [] for number in runners}
        self.running = sorted(runners)
        self._rounds = 0

    def run_round(self) -> None:
        """Time each candidate once, every second round backwards, so that a drift affects all
        alike."""
        for number in self.running if self._rounds % 2 == 0 else reversed(self.running):
            self.times[number].append(self.trial.seconds(*self.runners[number]))
        self._rounds += 1

    def prune(self) -> None:
        """Drop candidates that are clearly slower than the best, but never the default."""
        factors = self.settings.pruning
        least = self.gain(self.best()) / factors[min(self._rounds, len(factors)) - 1]
        self.running = [
            number for number in self.running if number == 0 or self.gain(number) >= least
        ]

    def best(self) -> int:
        return max(self.running, key=self.gain)

    def best_of_kinds(self) -> list[int]:
        kinds = {type(candidate) for candidate, _ in self.runners.values()}
        return [max(self._of_kind(kind), key=self.gain) for kind in kinds]

    def other(self, number: int) -> float | None:
        own = type(self.runners[number][0])
        others = [self.median(each) for each in self.runners if each not in self._of_kind(own)]
        return min(others, default=None)

    def _of_kind(self, kind: type) -> list[int]:
        return [
            number for number, (candidate, _) in self.runners.items() if type(candidate) is kind
        ]

    def gain(self, number: int) -> float:
        """Return how many times as fast as the default it is: the median over the rounds."""
        return statistics.median(self.gains(number))

    def median(self, number: int) -> float:
        return statistics.median(self.times[number])

    def spread(self, number: int) -> float:
        return _interquartile(self.times[number]) / self.median(number)

    def gains(self, number: int) -> list[float]:
        return [
            default / own for default, own in zip(self.times[0], self.times[number], strict=False)
        ]


def _interquartile(values: list[float]) -> float:
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower


def entry_fault(entry: Entry, trials: Trials) -> str | None:
    """Run an entry once and compare with exact arithmetic; say what is wrong, or return None."""
    needed = entry.key.bytes
    if needed > LARGEST_PRODUCT:
        return (
            f"not run, because its operands and its result take {needed / 2**30:.1f} GiB; remove"
            " the entry"
        )
    try:
        with contextlib.closing(trials(entry.key)) as trial:
            fault = trial.fault(entry.configuration)
    except (RuntimeError, ValueError, MemoryError) as error:
        fault = f"it does not run here ({error})"
    return fault and f"{fault}; tune this product again"
