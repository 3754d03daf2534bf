"""Runs exchanges during the backward pass in order, one after another.

Workers must start the collectives of buckets in the same order. Callbacks that issue further
collectives do not keep an order and hang; one queue does.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

Task = Callable[[], Tensor]


class WorkerThread:
    """Runs exchanges of the CPU in one thread, whose collectives block; the caller goes on at once.

    After a task has failed its group is of no use, so that all later ones fail with the same error.

    `explain`: turns the exception of a failed task into the one to raise.
    """

    def __init__(self, explain: Callable[[Exception], Exception] = lambda error: error):
        self._explain = explain
        self._tasks: queue.SimpleQueue[tuple[Task, Future] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Future:
        """A future of what `task` returns, or that raises what it raised."""
        if self._thread is None:
            arguments = self._tasks, self._explain, torch.get_num_threads()
            self._thread = threading.Thread(
                target=_work, args=arguments, name="lsq gradients", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
        done: Future = Future()
        self._tasks.put((task, done))
        # An error passes from Future to DDP's C++ only when a callback raises it.
        return done.then(_result)


def _work(
    tasks: queue.SimpleQueue, explain: Callable[[Exception], Exception], threads: int
) -> None:
    """Run tasks until None comes: nothing here keeps the WorkerThread alive."""
    torch.set_num_threads(threads)  # OpenMP counts for each thread that calls it
    failure: Exception | None = None
    while (entry := tasks.get()) is not None:
        task, done = entry
        outcome = failure
        if failure is None:
            try:
                outcome = task()
            except Exception as error:
                outcome = failure = explain(error)
        done.set_result(outcome)
        del entry, task, done, outcome  # until the next task comes, they would keep a bucket alive


def _result(future: Future) -> Tensor:
    outcome = future.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class SideStream:
    """Runs exchanges of a GPU on a stream of their own, ordered by events; nothing waits on the
    host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.Stream(device)

    def submit(self, task: Task) -> Future:
        """A future of what `task` returns, complete once the side stream has got there."""
        done: Future = Future(devices=[self.device])
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            done.set_result(task())  # records the events that whoever waits will wait for
        return done
