import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch

from lsq.memory.arena import HUGE_PAGE, Arena


def test_tensors_lie_where_they_are_put():
    arena = Arena(4096)
    a = arena.tensor(256, (3, 5), torch.float32)
    b = arena.tensor(1032, (7,), torch.int8)
    base = arena.tensor(0, (1,), torch.uint8).data_ptr()
    assert base % HUGE_PAGE == 0 and a.data_ptr() == base + 256 and b.data_ptr() == base + 1032
    assert a.shape == (3, 5) and a.is_contiguous() and a.dtype == torch.float32
    assert arena.tensor(4096, (0, 3), torch.float32).shape == (0, 3)
    assert arena.tensor(8, (), torch.int64).shape == ()


def test_tensors_share_their_bytes_whatever_their_type():
    arena = Arena(1024)
    arena.tensor(512, (2, 4), torch.float32).copy_(torch.arange(8.0).view(2, 4))
    assert arena.tensor(512 + 16, (4,), torch.float32).tolist() == [4, 5, 6, 7]
    arena.tensor(512, (32,), torch.uint8).fill_(0)
    assert not arena.tensor(512, (8,), torch.float32).any()
    assert arena.tensor(504, (4,), torch.bool).dtype == torch.bool


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


def test_what_is_lent_keeps_the_arena():
    arena = Arena(4096)
    lent, _ = arena.lend(0, (4,), torch.float32)
    del arena
    gc.collect()
    assert lent.fill_(3).sum() == 12


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


@pytest.mark.thorough
def test_memory_lives_as_long_as_its_tensors():
    arena = Arena(1024)
    slab = weakref.ref(arena._slab.untyped_storage())
    tensor = arena.tensor(0, (256,), torch.float32).fill_(3)
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None and tensor.sum() == 768
    del tensor
    gc.collect()
    assert slab() is None
