"""Which tests a run leaves out.

Few faults need more than two options to show, and where three or more options are multiplied out, a
small part of the combinations holds every pair of their values. `make test` runs such a part; the
rest is marked `thorough`. In the emulator a case takes far longer than on the CPU: there `make
test` runs one combination of each test, `make test-thorough` a part with every pair, and the rest
is marked `slow`.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest
import torch

NO_GPU = "for a CUDA GPU (torch sees none here)"
THOROUGH = "for `make test-thorough`"
SLOW = "marked slow (`pytest -m slow`, or by name)"


def pairwise(given: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """A small part of the combinations of options `given` that holds every pair of values that any
    of them holds.

    Greedy: the combination with most pairs that are still missing is next, of several the first;
        nothing is by chance.

    Args:
        given: name of each option -> its value, for each combination.

    Returns:
        Their numbers in `given`, ascending.
    """
    missing = {number: _parts(combination) for number, combination in enumerate(given)}
    chosen = []
    while missing:
        best = max(missing, key=lambda number: len(missing[number]))
        found = missing[best]
        chosen.append(best)
        missing = {number: rest for number, pairs in missing.items() if (rest := pairs - found)}
    return sorted(chosen)


def in_turn(several: Sequence, few: Sequence, times: int) -> list:
    """Parameters (one of `several`, one of `few`): `times` of the few for each of the several, in
    turn; the other pairs are marked `thorough`. For two options that have little to do with each
    other, and take long.
    """
    found = []
    for turn, (number, one) in product(range(len(several)), enumerate(few)):
        chosen = (number - turn * times) % len(few) < times
        found.append(pytest.param(several[turn], one, marks=() if chosen else pytest.mark.thorough))
    return found


def first(several: Iterable, count: int, thorough: int | None = None) -> list:
    """Parameters: the first `count` as they are, so many more marked `thorough` (None: all others),
    the rest marked `slow`.

    For tests that take seconds each, of things that are tested elsewhere, too. A tuple is the
    values of several arguments.
    """

    def marks(number: int):
        if number < count:
            return ()
        usual = thorough is None or number < count + thorough
        return pytest.mark.thorough if usual else pytest.mark.slow

    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks(number))
        for number, one in enumerate(several)
    ]


def check_folders(paths: Iterable[Path], items: Sequence[pytest.Item]) -> None:
    """Refuse a collection without a test of some folder that has test files.

    Args:
        paths: what was collected.
        items: what was found, before anything is left out.

    Raises:
        pytest.UsageError: there is such a folder; pytest passes over some names by default
        (norecursedirs).
    """
    folders = {file.parent for path in paths for file in path.rglob("test_*.py")}
    silent = sorted(map(str, folders - {item.path.parent for item in items}))
    if silent:
        raise pytest.UsageError(
            f"no test was collected in {', '.join(silent)}; does norecursedirs pass over it?"
        )


def mark_rest(items: Sequence[pytest.Item]) -> None:
    """Mark as `thorough` what no pair of option values needs, for each test function in `items`.

    What one `parametrize` lists is one option, however many arguments it names. What runs on a GPU
    is sampled apart from what does not, and so is what runs in the emulator, of which `thorough`
    one is left, `thorough` are the pairs, and `slow` is the rest.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not _marked(item, "thorough", "slow"):
            where = _marked(item, "gpu"), _emulated(item)
            tests[item.nodeid.partition("[")[0], *where].append(item)
    for (_, _, emulated), parametrized in tests.items():
        options = [_options(item) for item in parametrized]
        pairs = pairwise(options)
        sample = pairs[:1] if emulated else pairs
        for number, item in enumerate(parametrized):
            if number not in sample:
                slow = emulated and number not in pairs
                item.add_marker(pytest.mark.slow if slow else pytest.mark.thorough)


def leave_out(items: list[pytest.Item], config: pytest.Config) -> dict[str, int]:
    """Take from `items` what needs a GPU where torch sees none, and what is `thorough` or `slow`
    and not asked for.

    To ask is to give -m, or to name a test with `::`.

    Returns:
        Why tests were left out -> how many.
    """
    left_out = defaultdict(list)
    kept = []
    for item in items:
        if _marked(item, "gpu") and not torch.cuda.is_available():
            left_out[NO_GPU].append(item)
        elif (
            _marked(item, "thorough", "slow")
            and not config.option.markexpr
            and not _named(item, config)
        ):
            left_out[SLOW if _marked(item, "slow") else THOROUGH].append(item)
        else:
            kept.append(item)
    items[:] = kept
    for left in left_out.values():
        config.hook.pytest_deselected(items=left)
    return {reason: len(left) for reason, left in left_out.items()}


def _parts(combination: Mapping[str, Hashable]) -> frozenset[tuple]:
    """Every option with its value, and every two of them."""
    options = sorted(combination.items(), key=lambda option: option[0])
    return frozenset(combinations_with_replacement(options, 2))


def _options(item: pytest.Item) -> dict[str, tuple | int]:
    """Arguments of each option -> the identities of their values, which may be of any type."""
    values = {name: id(value) for name, value in item.callspec.params.items()}
    found = {}
    for mark in item.iter_markers("parametrize"):
        arguments = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = (
            [name.strip() for name in arguments.split(",")]
            if isinstance(arguments, str)
            else arguments
        )
        found[",".join(names)] = tuple(values.pop(name) for name in names)
    return found | values


def _emulated(item: pytest.Item) -> bool:
    """Whether a fixture's parameter says that kernels run in the emulator."""
    return any(value == "emulator" for value in item.callspec.params.values() if type(value) is str)


def _marked(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for mark in marks)


def _named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether an argument of pytest's command line names this test, with `::`."""
    arguments = [argument.partition("::") for argument in config.args]
    name = item.nodeid.partition("::")[2]
    return any(
        test
        and name.startswith(test)
        and (config.invocation_params.dir / path).resolve() == item.path.resolve()
        for path, _, test in arguments
    )
