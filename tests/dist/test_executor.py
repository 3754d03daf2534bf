"""The order of exchanges, and what happens to errors. A GPU's stream is tested with a GPU."""

import threading
import weakref

import pytest
import torch

from lsq.dist.executor import SideStream, WorkerThread


def test_tasks_run_in_order_in_one_other_thread():
    executor, seen = WorkerThread(), []

    def task(number: int):
        seen.append((number, threading.current_thread().name))
        return torch.tensor(number)

    futures = [executor.submit(lambda number=number: task(number)) for number in range(20)]
    assert [int(future.wait()) for future in futures] == list(range(20))
    assert [number for number, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"lsq gradients"}


def test_the_caller_does_not_wait():
    executor, gate = WorkerThread(), threading.Event()
    future = executor.submit(lambda: gate.wait(30) and torch.ones(1))
    assert not future.done()
    gate.set()
    assert future.wait() == 1


def test_an_error_ends_this_and_all_later_tasks():
    executor = WorkerThread(explain=lambda error: RuntimeError(f"explained: {error}"))

    def fail():
        raise OSError("lost")

    later = []
    futures = [executor.submit(fail), executor.submit(lambda: later.append(1))]
    for future in futures:
        with pytest.raises(RuntimeError, match="explained: lost"):
            future.wait()
    assert later == []


def test_an_idle_thread_keeps_no_tensor():
    executor, tensor = WorkerThread(), torch.ones(3)
    watched = weakref.ref(tensor)
    executor.submit(lambda tensor=tensor: tensor).wait()
    executor.submit(lambda: torch.ones(1)).wait()  # by now the first task is forgotten
    del tensor
    assert watched() is None


def test_threads_of_openmp_are_those_of_the_caller():
    found = WorkerThread().submit(lambda: torch.tensor(torch.get_num_threads())).wait()
    assert int(found) == torch.get_num_threads()


@pytest.mark.gpu
def test_a_side_stream_keeps_the_order_of_a_gpu():
    device = torch.device("cuda", 0)
    executor, x = SideStream(device), torch.ones(1 << 20, device=device)
    for _ in range(50):
        x.mul_(1.01)
    future = executor.submit(lambda: x.mul_(2))
    assert torch.allclose(future.wait(), torch.full_like(x, 2 * 1.01**50))
