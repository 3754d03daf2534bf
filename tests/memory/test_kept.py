"""Memory of the process: tensors, rooms, and the arenas, pool and workspaces behind them."""

import copy
import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lsq.memory import kept
from lsq.memory.kept import HUGE_PAGE, Arena, Gaps, Pool, Room, Workspace

LARGE = (kept.SMALLEST,)
CPU = torch.device("cpu")
LIVES = [(1000, 0, 1), (600, 1, 2), (900, 2, 3), (0, 0, 3)]


def test_large_tensors_find_the_memory_of_those_before_until_it_is_released():
    first = kept.tensor(LARGE, torch.int8).fill_(1)
    address = first.data_ptr()
    assert first.untyped_storage().nbytes() == kept.SMALLEST
    kept.release()  # leaves what is in use alone
    assert first.all()
    del first
    assert kept.tensor((kept.SMALLEST // 4, 1), torch.float32).data_ptr() == address
    assert kept.tensor((3, 0), torch.float32).shape == (3, 0)
    kept.release()
    again = kept.tensor(LARGE, torch.int8)
    assert again.data_ptr() == address and not again.any()


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
    first, second = kept.nothing_kept(), kept.nothing_kept()
    first.__enter__()
    with second:
        first.__exit__(None, None, None)  # as another thread may, in between
        tensor = kept.tensor(LARGE, torch.int8)
        with kept.room(CPU) as found:
            assert found.arena is None
    address = tensor.data_ptr()
    del tensor
    assert kept.tensor(LARGE, torch.int8).data_ptr() != address
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
    assert torch.equal(torch.load(tmp_path / "kept.pt"), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
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


# Arenas


def test_tensors_lie_where_they_are_put():
    arena = Arena(4096)
    a = arena.tensor(256, (3, 5), torch.float32)
    b = arena.tensor(1032, (7,), torch.int8)
    base = arena.tensor(0, (1,), torch.uint8).data_ptr()
    assert base % HUGE_PAGE == 0 and a.data_ptr() == base + 256 and b.data_ptr() == base + 1032
    assert a.shape == (3, 5) and a.is_contiguous() and a.dtype == torch.float32
    assert arena.tensor(4096, (0, 3), torch.float32).shape == (0, 3)
    assert arena.tensor(8, (), torch.int64).shape == ()


def test_what_is_lent_has_a_storage_of_its_own():
    arena = Arena(4096)
    lent, alive = arena.lend(256, (3, 5), torch.float32)
    arena.tensor(256, (3, 5), torch.float32).fill_(7)
    assert lent.shape == (3, 5) and (lent == 7).all() and not lent._is_view()
    assert (
        lent.untyped_storage().data_ptr() == lent.data_ptr()
        and lent.untyped_storage().nbytes() == 60
    )
    view = lent[1]
    del lent
    assert alive() is not None
    del view
    assert alive() is None


@pytest.mark.parametrize(
    "offset, shape, dtype",
    [
        (-4, (1,), torch.float32),
        (1000, (7,), torch.float32),
        (2, (1,), torch.float32),
        (0, (1025,), torch.int8),
    ],
)
def test_what_does_not_fit_is_refused(offset, shape, dtype):
    with pytest.raises(ValueError, match=rf"offset {offset} does not fit an arena of 1024 bytes"):
        Arena(1024).tensor(offset, shape, dtype)
    with pytest.raises(ValueError, match="does not fit an arena"):
        Arena(1024).lend(offset, shape, dtype)


def overcommit() -> str:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        return ""


@pytest.mark.skipif(
    overcommit() not in "01" or sys.platform != "linux",
    reason="the system reserves all memory ahead",
)
def test_a_plan_may_be_larger_than_the_machine():
    arena = Arena(1 << 40)
    arena.tensor((1 << 40) - 64, (16,), torch.float32).fill_(1)
    arena.tensor(0, (16,), torch.float32).fill_(1)


def test_what_the_system_refuses_is_explained():
    with pytest.raises(
        MemoryError, match="no address space for a plan of .* bytes .*plan for smaller batches"
    ):
        Arena(1 << 60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_takes_no_copy():
    arena = Arena(4096)
    tensor = arena.tensor(0, (1024,), torch.uint8).fill_(7)
    worker = os.fork()
    if worker == 0:
        os._exit(int(tensor[5]))
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 7) and (tensor == 7).all()
    if sys.platform == "linux":
        assert os.waitstatus_to_exitcode(status) == 0


# The pool


def test_memory_that_nothing_uses_any_more_is_taken_again():
    pool = Pool(1 << 22)
    first, second = pool.tensor((300, 7), torch.float32), pool.tensor((500,), torch.int8)
    address, view = first.data_ptr(), first[3].fill_(5)
    del first
    third = pool.tensor((300, 7), torch.float32).fill_(1)
    assert third.data_ptr() != address and (view == 5).all() and third.is_contiguous()
    del view
    assert pool.tensor((300, 7), torch.float32).data_ptr() == address
    assert second.untyped_storage().nbytes() == 500
    assert pool.tensor((1 << 22,), torch.uint8) is None
    del second, third
    assert pool.tensor((1 << 22,), torch.uint8) is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pool_serves_every_grad_mode_and_keeps_what_autograd_has_saved(mode):
    pool = Pool(1 << 20)
    with mode():
        address = pool.tensor((64,), torch.float32).fill_(1).data_ptr()
    x = pool.tensor((64,), torch.float32).fill_(3).requires_grad_()
    y = x.square().sum()
    assert x.data_ptr() == address != pool.tensor((64,), torch.float32).fill_(0).data_ptr()
    y.backward()
    assert (x.grad == 6).all()


def test_threads_never_share_memory():
    pool, failures = Pool(1 << 26), []

    def work(number: int) -> None:
        for step in range(200):
            sizes = [1000 * (1 + (step + one) % 7) for one in range(3)]
            tensors = [pool.tensor((size,), torch.float32).fill_(number) for size in sizes]
            failures.extend(tensor for tensor in tensors if not (tensor == number).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_smallest_gap_that_has_the_bytes_is_taken():
    gaps = Gaps(1000, alignment=1)
    assert [gaps.take(size) for size in (100, 50, 200, 50, 600)] == [0, 100, 150, 350, 400]
    assert gaps.take(1) is None and list(gaps) == []
    for start, size in ((150, 200), (0, 100), (350, 50)):
        gaps.give_back(start, size)
    assert list(gaps) == [(0, 100), (150, 250)]
    assert gaps.take(90) == 0 and gaps.take(90) == 150 and gaps.take(161) is None
    assert gaps.take(160) == 240 and list(gaps) == [(90, 10)]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_taking_and_giving_back(seed):
    chance, size, alignment = random.Random(seed), 1 << 14, 64
    gaps, taken, owner = Gaps(size, alignment), [], [None] * size
    for number in range(2000):
        if taken and chance.random() < 0.5:
            start, length = taken.pop(chance.randrange(len(taken)))
            assert len(set(owner[start : start + length])) == 1
            owner[start : start + length] = [None] * length
            gaps.give_back(start, length)
        else:
            length = chance.randint(1, 900)
            start = gaps.take(length)
            if start is None:
                assert max((bytes_ for _, bytes_ in gaps), default=0) < length
                continue
            assert start % alignment == 0 and set(owner[start : start + length]) == {None}
            owner[start : start + length] = [number] * length
            taken.append((start, length))
        free = list(gaps)
        assert all(one[0] + one[1] < other[0] for one, other in zip(free, free[1:], strict=False))
    for start, length in taken:
        gaps.give_back(start, length)
    assert list(gaps) == [(0, size)]


# Workspaces, in memory that stays or comes and goes


@pytest.mark.parametrize("lasting", [1 << 30, 0])
def test_tensors_that_are_needed_together_lie_apart_and_others_share_bytes(lasting):
    workspace = Workspace(Room("cpu", lasting), LIVES)
    sizes = enumerate(size for size, _, _ in LIVES)
    a, b, c, empty = (workspace.tensor(number, (size,), torch.uint8) for number, size in sizes)
    assert workspace.size < 2560 and empty.shape == (0,)
    with workspace.opened():
        a.fill_(1)
        b.fill_(2)
        assert (a == 1).all()
        c.fill_(3)
        assert (b == 2).all() and not (a == 1).all()


def test_workspaces_of_a_lasting_room_begin_at_one_address_and_never_move():
    room = Room("cpu", 1 << 30)
    small, large = Workspace(room, [(400, 0, 0)]), Workspace(room, [(1 << 22, 0, 0), (400, 0, 0)])
    x, y = small.tensor(0, (100,), torch.float32), large.tensor(0, (1 << 20,), torch.float32)
    assert x.data_ptr() == y.data_ptr()
    for workspace in (small, large, small):
        with workspace.opened() as moved:
            assert not moved
    y.fill_(3)
    room.release()
    assert not y.any()  # another page
    with small.opened():
        assert x.fill_(2).sum() == 200


def test_tensors_follow_passing_memory_which_is_there_only_meanwhile():
    workspace = Workspace(Room("cpu"), [(1 << 20, 0, 0), (64, 0, 0)])
    x = workspace.tensor(0, (512, 512), torch.float32)
    y = workspace.tensor(1, (8, 2), torch.float32)
    with workspace.opened():
        between = y.data_ptr() - x.data_ptr()
    assert x.untyped_storage().nbytes() == 0
    with pytest.raises(ZeroDivisionError), workspace.opened():
        before = x.data_ptr()
        raise ZeroDivisionError
    assert x.untyped_storage().nbytes() == 0
    others = []
    while True:  # until its bytes are taken
        others.append(torch.empty(1 << 18))
        with workspace.opened() as moved:
            assert moved == (x.data_ptr() != before) and y.data_ptr() - x.data_ptr() == between
            assert y.fill_(3).sum() == 48
            if moved:
                break
        assert len(others) < 100


def test_what_is_lent_keeps_the_arena():
    arena = Arena(4096)
    lent, _ = arena.lend(0, (4,), torch.float32)
    del arena
    gc.collect()
    assert lent.fill_(3).sum() == 12
