import gc
import weakref

import pytest
import torch

from lsq.memory.arena import HUGE_PAGE, Arena


def test_tensors_lie_where_they_are_put():
    arena = Arena([4096, 1000])
    a = arena.tensor(0, 256, (3, 5), torch.float32)
    b = arena.tensor(1, 8, (7,), torch.int8)
    base = arena.tensor(0, 0, (1,), torch.uint8).data_ptr()
    assert base % HUGE_PAGE == 0 and a.data_ptr() == base + 256 and b.data_ptr() % HUGE_PAGE == 8
    assert a.shape == (3, 5) and a.stride() == (5, 1) and a.is_contiguous() and a.dtype == torch.float32
    assert arena.size == 5096


def test_tensors_share_their_bytes_whatever_their_type():
    arena = Arena([1024])
    arena.tensor(0, 512, (2, 4), torch.float32).copy_(torch.arange(8.0).view(2, 4))
    assert arena.tensor(0, 512 + 16, (4,), torch.float32).tolist() == [4, 5, 6, 7]
    arena.tensor(0, 512, (32,), torch.uint8).fill_(0)
    assert not arena.tensor(0, 512, (8,), torch.float32).any()
    assert arena.tensor(0, 504, (4,), torch.bool).dtype == torch.bool


def test_empty_tensors_and_scalars():
    arena = Arena([64])
    assert arena.tensor(0, 64, (0, 3), torch.float32).shape == (0, 3)
    assert arena.tensor(0, 8, (), torch.int64).shape == ()


@pytest.mark.parametrize("offset, shape, dtype", [
    (-4, (1,), torch.float32), (1000, (7,), torch.float32), (2, (1,), torch.float32), (0, (1025,), torch.int8),
])
def test_what_does_not_fit_is_refused(offset, shape, dtype):
    with pytest.raises(ValueError, match=rf"offset {offset} does not fit segment 0 of 1024 bytes"):
        Arena([1024]).tensor(0, offset, shape, dtype)


def test_memory_lives_as_long_as_its_tensors():
    arena = Arena([1024])
    slab = weakref.ref(arena._slabs[0].untyped_storage())
    tensor = arena.tensor(0, 0, (256,), torch.float32).fill_(3)
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None and tensor.sum() == 768
    del tensor
    gc.collect()
    assert slab() is None
