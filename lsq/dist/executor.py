"""Runs exchanges in order, one after another, during the backward pass.

All workers must start the collectives of buckets in the same order. One queue keeps it. Callbacks
that start further collectives would not, and would hang.
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
    """Runs exchanges on the CPU in one thread, since their collectives block; the caller goes on.

    After a failed task its group is unusable, so all later tasks fail with the same error.
    `explain`: turns the exception of a failed task into the exception to raise.
    """

    def __init__(self, explain: Callable[[Exception], Exception] = lambda error: error):
        self._explain = explain
        self._tasks: queue.SimpleQueue[tuple[Task, Future] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> Future:
        """Return a future with the result of `task`, or with its exception."""
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
    """Run tasks until None comes. Nothing here keeps the WorkerThread alive."""
    torch.set_num_threads(threads)  # OpenMP has its own number for each calling thread
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
        del entry, task, done, outcome  # else they keep a bucket alive until the next task


def _result(future: Future) -> Tensor:
    outcome = future.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class SideStream:
    """Runs exchanges on a side stream of a GPU, ordered by events; the host does not wait."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.Stream(device)

    def submit(self, task: Task) -> Future:
        """Return a future with the result of `task`, complete when the side stream has done it."""
        done: Future = Future(devices=[self.device])
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            done.set_result(task())  # records the events to wait for
        return done
