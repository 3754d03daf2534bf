"""Search near a mix of formats: costs of single tensors add up roughly.

In a mix each unit gets the next smaller and the next larger choice in turn, and the divergence of
the model is measured. From these the knapsack makes the next mix, in which some units may change:
all at first, and half as many after each mix that is no better. At last come exchanges between two
units, the most promising first.
"""

import itertools

from lsq.study.knapsack import Choice, Item, Problem, exact
from lsq.study.proposals import Measure, Picked, uniform

EXCHANGES = 48
"""Most exchanges to measure around a mix."""
BETTER = 1e-6
"""By which share a divergence must fall to count as better."""
Near = list[dict[int, float]]
"""For each item, choice -> divergence of a mix with it."""


def refine(problem: Problem, start: Picked, measure: Measure, seed: int) -> None:
    """Search near `start`, and near the uniform mix that is better than it, if any. `seed`: nothing
    is drawn."""
    best = min([start, *uniform(problem)], key=measure)
    while True:
        least, near = measure(best), _around(problem, best, measure)
        for mix in _promising(problem, best, near):
            if measure(mix) < least * (1 - BETTER):
                best = mix
                break
        else:
            return


def _around(problem: Problem, best: Picked, measure: Measure) -> Near:
    """Measure each item's next smaller and next larger choice; these may exceed the budgets."""
    found = []
    for number, item in enumerate(problem.items):
        order = sorted(range(len(item.choices)), key=lambda one: item.choices[one].takes)
        at = order.index(best[number])
        near = order[max(at - 1, 0) : at + 2]
        found.append({one: measure(_with(best, {number: one})) for one in near})
    return found


def _with(mix: Picked, changes: dict[int, int]) -> Picked:
    return tuple(changes.get(number, one) for number, one in enumerate(mix))


def _promising(problem: Problem, best: Picked, near: Near):
    """Yield mixes by sums of divergences: of fewer and fewer changes, then exchanges."""
    changes = len(problem.items)
    while changes:
        mix = _next(problem, best, near, changes)
        if mix is not None:
            yield mix
        changes //= 2
    yield from _exchanges(problem, best, near)


def _next(problem: Problem, best: Picked, near: Near, changes: int) -> Picked | None:
    """Return the mix of the least sum of divergences in which few items change."""
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
        for item, choices, each, now in zip(problem.items, near, numbers, best, strict=True)
    ]
    found = exact(Problem(items=tuple(items), budgets=(*problem.budgets, float(changes))))
    if found is None:
        return None
    return tuple(each[one] for each, one in zip(numbers, found, strict=True))


def _exchanges(problem: Problem, best: Picked, near: Near) -> list[Picked]:
    """Return the best mix with one or two items changed, the least sums first."""
    changes = [
        (number, one, divergence - choices[best[number]])
        for number, choices in enumerate(near)
        for one, divergence in choices.items()
        if one != best[number]
    ]
    pairs = itertools.chain(((change,) for change in changes), itertools.combinations(changes, 2))
    found = []
    for pair in sorted(pairs, key=lambda pair: sum(one[2] for one in pair)):
        mix = _with(best, {number: one for number, one, _ in pair})
        if problem.fits(mix):
            found.append(mix)
        if len(found) == EXCHANGES:
            break
    return found
