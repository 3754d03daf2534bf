"""The exact search of `plan`: which capacities to try, in which orders, and for how long.

The search itself, depth first after Moffitt 2023 (MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning, ASPLOS), is C++: lsq/csrc/cpu/planner_search.cpp. How long it
takes hangs on the order in which it tries buffers, with a heavy tail; so it starts again and again
with other orders, each time with a larger budget.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from lsq.memory.placement import Placement, place, table
from lsq.memory.planner import busiest_loads
from lsq.native import loader
from lsq.native.shared_library import LibraryError
from lsq.planner.buffer import Buffer, given_offsets

MOST_BUFFERS = 4096
"""The search compares every pair of buffers; of more, the smallest are set aside."""
SMALL_SHARE = 2**14
"""Buffers below capacity / SMALL_SHARE (64 KiB of 1 GiB) are set aside: placed afterwards, where
they fit."""
FIRST_BUDGET = 4096
"""Positions that the first round may try with each order; every further round may try twice as
many."""
NOISE = 0.4
"""Lives and sizes are shortened at random by up to this share where orders are varied."""
WAIT = 0.1
"""Seconds between two looks at the clock and two calls of `progress`."""

IMPOSSIBLE, FOUND, STOPPED = range(3)


def improve(
    buffers: Sequence[Buffer],
    placement: Placement,
    bound: int,
    capacity: int | None,
    seconds: float,
    progress: Callable[[int], None] | None = None,
) -> Placement:
    """Look for a placement into one segment that is better than the given one.

    Args:
        buffers: those of one pool, none of size 0.
        placement: the best that is known; it is returned where no better one is found.
        bound: the lower bound in bytes.
        capacity: bytes that are good enough; None asks for the smallest peak. Half of the time goes
            to the capacity (or the bound), half of what remains to the middle between it and the
            best that is known, and so on.
        seconds: time for all of it. KeyboardInterrupt ends it, too.
        progress: called several times a second with the number of positions tried so far.

    Raises:
        LibraryError: the C++ host library is not built.
    """
    if not loader.available():
        raise LibraryError(
            'method "exact" needs the C++ host library; install g++ (Debian: apt-get install g++)'
            " and reinstall lsq, "
            'or use method "portfolio"'
        )
    deadline = time.perf_counter() + seconds
    worker = _Worker(progress or (lambda tried: None))
    wanted = bound if capacity is None else max(bound, capacity)
    target = lowest = wanted
    try:
        while (
            placement.used[0] > max(wanted, lowest) and (left := deadline - time.perf_counter()) > 0
        ):
            found = _search(buffers, target, time.perf_counter() + left / 2, worker)
            if found is None:
                lowest = target + 1
            else:
                placement = found
            target = (lowest + placement.used[0] - 1) // 2
    except KeyboardInterrupt:
        pass
    return placement


class _OutOfTime(Exception):
    """The deadline has come."""


class _Worker:
    """Runs the C++ search in a thread, so that the deadline and Ctrl-C reach this one."""

    def __init__(self, progress: Callable[[int], None]):
        self.progress = progress
        self.control = torch.zeros(2, dtype=torch.int64, device="cpu")
        """What the running search reads and adds to: stop flag, positions tried."""

    def run(
        self,
        buffers: Sequence[Buffer],
        order: Sequence[int],
        capacity: int,
        budget: int,
        deadline: float,
    ) -> tuple[int, list[int]]:
        """(outcome, offsets) of one search.

        Raises:
            _OutOfTime: the deadline came first.
        """
        numbers = {"dtype": torch.int64, "device": "cpu"}
        rows, wanted = table(buffers, given_offsets(buffers)), torch.tensor(order, **numbers)
        offsets, outcome = torch.zeros(len(buffers), **numbers), torch.zeros(1, **numbers)
        self.control[0] = 0
        arguments = (rows, wanted, len(buffers), capacity, budget, self.control, offsets, outcome)
        thread = threading.Thread(target=loader.call, args=("lsq_search_plan", *arguments))
        thread.start()
        try:
            while thread.is_alive():
                thread.join(max(0.0, min(WAIT, deadline - time.perf_counter())))
                self.progress(int(self.control[1]))
                if time.perf_counter() > deadline:
                    break
        finally:
            self.control[0] = 1
            thread.join()
        if outcome.item() == STOPPED and time.perf_counter() > deadline:
            raise _OutOfTime
        return outcome.item(), offsets.tolist()


def _search(
    buffers: Sequence[Buffer], capacity: int, deadline: float, worker: _Worker
) -> Placement | None:
    """A placement of at most `capacity` bytes; None where there is none, or the deadline came
    first."""
    smallest = capacity // SMALL_SHARE
    if len(buffers) > MOST_BUFFERS:
        smallest = max(
            smallest, sorted((buffer.size for buffer in buffers), reverse=True)[MOST_BUFFERS] + 1
        )
    budget = FIRST_BUDGET
    generator = random.Random(0)
    try:
        while True:
            for key in _keys(buffers, generator):
                given = given_offsets(buffers)
                large = [i for i, one in enumerate(buffers) if one.size >= smallest or i in given]
                searched = [buffers[i] for i in large]
                order = sorted(range(len(large)), key=lambda i: key[large[i]])  # noqa: B023
                outcome, offsets = worker.run(searched, order, capacity, budget, deadline)
                if outcome == IMPOSSIBLE:
                    return None
                if outcome == FOUND:
                    completed = _with_small(buffers, dict(zip(large, offsets, strict=True)))
                    if completed.used[0] <= capacity:
                        return completed
                    if len(buffers) <= MOST_BUFFERS:
                        smallest //= 4
            budget *= 2
    except _OutOfTime:
        return None


def _keys(buffers: Sequence[Buffer], generator: random.Random) -> Iterator[list[tuple]]:
    """Sorting keys of one round: load, life and area in three orders, as in MiniMalloc, then three
    at random."""
    loads = busiest_loads(buffers)
    lives = [buffer.last - buffer.first + 1 for buffer in buffers]
    areas = [life * buffer.size for life, buffer in zip(lives, buffers, strict=True)]
    yield [(-a, -b, -c) for a, b, c in zip(loads, lives, areas, strict=True)]
    yield [(-a, -b, -c) for a, b, c in zip(areas, lives, loads, strict=True)]
    yield [(-a, -b, -c) for a, b, c in zip(lives, areas, loads, strict=True)]
    for values in (lives, areas, lives):
        yield [(-value * generator.uniform(1 - NOISE, 1),) for value in values]


def _with_small(buffers: Sequence[Buffer], offsets: dict[int, int]) -> Placement:
    """Best fit of the buffers that have no offset yet, the largest first, around the others."""
    order = sorted(range(len(buffers)), key=lambda i: -buffers[i].size)
    return place(buffers, order, fixed=offsets)
