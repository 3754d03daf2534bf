"""The pool: tensors of their own whose memory the next ones take."""

import gc
import random
import threading

import pytest
import torch

from lsq.memory.pool import Gaps, Pool


def test_memory_that_nothing_uses_any_more_is_taken_again():
    pool = Pool(1 << 22)
    first, second = pool.tensor((300, 7), torch.float32), pool.tensor((500,), torch.int8)
    place = first.data_ptr()
    view = first[3].fill_(5)
    del first
    third = pool.tensor((300, 7), torch.float32).fill_(1)
    assert third.data_ptr() != place and (view == 5).all()
    del view
    assert pool.tensor((300, 7), torch.float32).data_ptr() == place
    assert second.untyped_storage().nbytes() == 500 and third.is_contiguous()


def test_there_is_no_room_for_more_than_its_size():
    pool = Pool(1 << 16)
    kept = pool.tensor((1 << 15,), torch.uint8)
    assert pool.tensor((1 << 16,), torch.uint8) is None
    del kept
    assert pool.tensor((1 << 16,), torch.uint8) is not None


def test_autograd_keeps_what_it_has_saved():
    pool = Pool(1 << 20)
    x = pool.tensor((1000,), torch.float32).fill_(2).requires_grad_()
    y = (x * x).sum()
    place = x.data_ptr()
    del x
    assert pool.tensor((1000,), torch.float32).data_ptr() != place
    y.backward()
    del y
    gc.collect()
    assert pool.tensor((1000,), torch.float32).data_ptr() == place


def test_release_leaves_what_is_in_use():
    pool = Pool(1 << 24)
    kept, other = pool.tensor((1 << 20,), torch.float32), pool.tensor((1 << 20,), torch.float32)
    kept.fill_(3)
    other.fill_(4)
    place = other.data_ptr()
    del other
    pool.release()
    assert (kept == 3).all()
    again = pool.tensor((1 << 20,), torch.float32)
    assert again.data_ptr() == place and not again.any()


def test_threads_never_share_memory():
    pool, failures = Pool(1 << 26), []

    def work(number: int) -> None:
        for step in range(200):
            tensors = [
                pool.tensor((1000 * (1 + (step + one) % 7),), torch.float32).fill_(number)
                for one in range(3)
            ]
            failures.extend(tensor for tensor in tensors if not (tensor == number).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pool_serves_every_grad_mode(mode):
    pool = Pool(1 << 20)
    with mode():
        pool.tensor((64,), torch.float32).fill_(1)
    x = pool.tensor((64,), torch.float32).fill_(3).requires_grad_()
    x.square().sum().backward()
    assert (x.grad == 6).all()


def test_the_smallest_gap_that_has_the_bytes_is_taken():
    gaps = Gaps(1000, alignment=1)
    assert [gaps.take(size) for size in (100, 50, 200, 50, 600)] == [0, 100, 150, 350, 400]
    assert gaps.take(1) is None and list(gaps) == []
    gaps.give_back(150, 200)
    gaps.give_back(0, 100)
    gaps.give_back(350, 50)
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
