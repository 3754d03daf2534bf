"""The exact search of `plan`: which capacities it tries, in which orders of buffers, and how long.

The search itself is C++ (lsq/csrc/cpu/planner.cpp): depth first, after Moffitt 2023 (MiniMalloc,
ASPLOS). Its time depends on the order in which it tries buffers, with a heavy tail. So it restarts
with other orders, each round with a larger budget.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from lsq.memory.buffers import Buffer, fixed_offsets, lower_bound, peak_of, place, table
from lsq.native import loader
from lsq.native.sources import LibraryError

MOST_BUFFERS = 4096
"""Most buffers of a search, which compares every pair; the smallest are set aside."""
SMALL_SHARE = 2**14
"""Buffers below capacity / SMALL_SHARE are set aside, and placed afterwards where they fit."""
FIRST_BUDGET = 4096
"""Positions that the first round tries with each order; every round doubles it."""
NOISE = 0.4
"""Random orders shrink the sort keys (lives, areas) by up to this share."""
WAIT = 0.1
"""Most seconds between two looks at the clock, with a call of `progress` each."""

IMPOSSIBLE, FOUND, STOPPED = range(3)


def improve(
    buffers: Sequence[Buffer],
    loads: Sequence[int],
    offsets: list[int],
    target: int,
    seconds: float,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Search for better `offsets`; return the given ones if none are found. KeyboardInterrupt ends
    the search.

    Args:
        buffers: none of size 0.
        loads: the largest live load during each life.
        offsets: the best known ones.
        target: a peak, in bytes, that is good enough. It gets half of `seconds`. Half of the rest
            goes to the middle between it and the best known peak, and so on.
        seconds: time for all searches together.
        progress: gets the number of positions tried, several times a second.

    Raises:
        LibraryError: the C++ host library is not built.
    """
    if not loader.available():
        raise LibraryError(
            'method "exact" needs the C++ host library; install g++ (Debian: apt-get install g++)'
            ' and reinstall lsq, or use method "portfolio"'
        )
    deadline = time.perf_counter() + seconds
    worker = _Worker(progress or (lambda tried: None))
    capacity = lowest = max(target, lower_bound(buffers))
    try:
        while peak_of(buffers, offsets) > lowest and (left := deadline - time.perf_counter()) > 0:
            better = search(buffers, loads, capacity, time.perf_counter() + left / 2, worker)
            if better is None:
                lowest = capacity + 1
            else:
                offsets = better
            capacity = (lowest + peak_of(buffers, offsets) - 1) // 2
    except KeyboardInterrupt:
        pass
    return offsets


class _OutOfTime(Exception):
    pass


class _Worker:
    """Runs the C++ search in a thread, so that this thread sees the deadline and Ctrl-C."""

    def __init__(self, progress: Callable[[int], None]):
        self.progress = progress
        # the running search reads the stop flag and adds to the number of positions tried
        self.control = torch.zeros(2, dtype=torch.int64, device="cpu")

    def run(
        self,
        buffers: Sequence[Buffer],
        order: Sequence[int],
        capacity: int,
        budget: int,
        deadline: float,
    ) -> tuple[int, list[int]]:
        """Return (outcome, offsets) of one search. Raises _OutOfTime: the deadline came first."""
        numbers = {"dtype": torch.int64, "device": "cpu"}
        rows, indices = table(buffers, fixed_offsets(buffers)), torch.tensor(order, **numbers)
        offsets, outcome = torch.zeros(len(buffers), **numbers), torch.zeros(1, **numbers)
        self.control[0] = 0
        arguments = (rows, indices, len(buffers), capacity, budget, self.control, offsets, outcome)
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


def search(
    buffers: Sequence[Buffer], loads: Sequence[int], capacity: int, deadline: float, worker: _Worker
) -> list[int] | None:
    """Return offsets within `capacity` bytes; None: there are none, or the deadline came first."""
    smallest = capacity // SMALL_SHARE
    if len(buffers) > MOST_BUFFERS:
        sizes = sorted((buffer.size for buffer in buffers), reverse=True)
        smallest = max(smallest, sizes[MOST_BUFFERS] + 1)
    budget = FIRST_BUDGET
    fixed = fixed_offsets(buffers)
    generator = random.Random(0)
    try:
        while True:
            for keys in _sorting_keys(buffers, loads, generator):
                large = [i for i, each in enumerate(buffers) if each.size >= smallest or i in fixed]
                order = sorted(range(len(large)), key=[keys[i] for i in large].__getitem__)
                outcome, offsets = worker.run(
                    [buffers[i] for i in large], order, capacity, budget, deadline
                )
                if outcome == IMPOSSIBLE:
                    return None
                if outcome == FOUND:
                    # place the rest by best fit around these, the largest first
                    by_size = sorted(range(len(buffers)), key=lambda i: -buffers[i].size)
                    known = dict(zip(large, offsets, strict=True))
                    complete = place(buffers, by_size, known)
                    if peak_of(buffers, complete) <= capacity:
                        return complete
                    if len(buffers) <= MOST_BUFFERS:
                        smallest //= 4
            budget *= 2
    except _OutOfTime:
        return None


def _sorting_keys(
    buffers: Sequence[Buffer], loads: Sequence[int], generator: random.Random
) -> Iterator[list[tuple]]:
    """Yield sort keys: load, life and area in three orders, as in MiniMalloc, then three at
    random."""
    lives = [buffer.operations for buffer in buffers]
    areas = [life * buffer.size for life, buffer in zip(lives, buffers, strict=True)]
    for columns in ((loads, lives, areas), (areas, lives, loads), (lives, areas, loads)):
        yield [(-a, -b, -c) for a, b, c in zip(*columns, strict=True)]
    for values in (lives, areas, lives):
        yield [(-value * generator.uniform(1 - NOISE, 1),) for value in values]
