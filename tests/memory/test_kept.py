"""Kept memory: large tensors of the CPU come from the pool, rooms are for one pass at a time, all
can be given back."""

import copy
import os
import subprocess
import sys
import threading

import pytest
import torch

from lsq.memory import kept

LARGE = (kept.SMALLEST,)
CPU = torch.device("cpu")


def test_large_tensors_find_the_memory_of_those_before():
    first = kept.tensor(LARGE, torch.int8).fill_(1)
    place = first.data_ptr()
    assert first.untyped_storage().nbytes() == kept.SMALLEST
    del first
    assert kept.tensor(LARGE, torch.int8).data_ptr() == place
    assert kept.tensor((kept.SMALLEST // 4, 1), torch.float32).data_ptr() == place
    assert kept.tensor((3, 0), torch.float32).shape == (3, 0)


def test_released_memory_is_cleared():
    tensor = kept.tensor(LARGE, torch.int8).fill_(1)
    place = tensor.data_ptr()
    kept.release()
    assert tensor.all()
    del tensor
    kept.release()
    again = kept.tensor(LARGE, torch.int8)
    assert again.data_ptr() == place and not again.any()


def test_a_room_is_for_one_at_a_time():
    with kept.room(CPU) as first, kept.room(CPU) as second:
        assert first is not second and first.arena is not None
        kept.release()  # leaves both alone
    seen = []

    def work() -> None:
        with kept.room(CPU) as found:
            seen.append(found)

    with kept.room(CPU) as third:
        assert third is first
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [second]


def test_nothing_is_kept_where_profilers_look():
    with kept.nothing_kept():
        tensor = kept.tensor(LARGE, torch.int8)
        with kept.room(CPU) as found:
            assert found.arena is None
    place = tensor.data_ptr()
    del tensor
    assert kept.tensor(LARGE, torch.int8).data_ptr() != place


def test_memory_is_kept_again_when_the_last_thread_has_left():
    first, second = kept.nothing_kept(), kept.nothing_kept()
    first.__enter__()
    with second:
        first.__exit__(None, None, None)  # as another thread may, in between
        with kept.room(CPU) as found:
            assert found.arena is None
    with kept.room(CPU) as found:
        assert found.arena is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_reads_what_is_kept_and_has_memory_of_its_own():
    tensor = kept.tensor(LARGE, torch.int8).fill_(3)
    worker = os.fork()
    if worker == 0:
        own = kept.tensor(LARGE, torch.int8)
        own[7] = 5  # without the threads that a forked process has not
        with kept.room(CPU) as found:
            os._exit(int(tensor[7]) + int(own[7]) + (found.arena is not None))
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 9 and (tensor == 3).all()


def test_kept_tensors_can_be_copied_saved_and_shared(tmp_path):
    tensor = kept.tensor(LARGE, torch.int8).fill_(3)
    torch.save(tensor, tmp_path / "kept.pt")
    assert torch.equal(torch.load(tmp_path / "kept.pt"), tensor) and torch.equal(
        copy.deepcopy(tensor), tensor
    )
    tensor.share_memory_()
    assert tensor.is_shared() and (tensor == 3).all()


@pytest.mark.thorough
def test_a_process_with_little_address_space_warns_and_works():
    program = """
import resource, warnings
import torch
from lsq.memory import kept
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    tensors = [kept.tensor((1 << 20,), torch.int8).fill_(1) for _ in range(2)]
    with kept.room(torch.device("cpu")) as room:
        assert room.arena is None
    kept.release()
print(len(found), "ulimit -v" in str(found[0].message), sum(int(one.sum()) for one in tensors))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "True", str(2 << 20)], done.stderr
