"""The group that counts: what each collective must send, and that it does what it is for."""

import pytest
import torch
from counting_group import CountingGroup, Wires, run
from torch import distributed

from lsq.dist.collectives import all_gather, all_to_all


def counted(workers: int, work, **options) -> tuple[dict, list]:
    """(sender, receiver) -> bytes, and what work(group, rank) returned on each worker."""
    wires = Wires()
    results = run(
        workers, lambda rank: work(CountingGroup(wires, range(workers), rank, **options), rank)
    )
    return dict(wires.bytes), results


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_ring_sends_twice_all_but_one_piece_to_the_next(workers, dtype):
    values = 24 * workers

    def work(group, rank):
        x = torch.full((values,), rank + 1).to(dtype)
        distributed.all_reduce(x, group=group)
        return x

    sent, results = counted(workers, work)
    each = 2 * (workers - 1) * 24 * dtype.itemsize
    assert sent == {(rank, (rank + 1) % workers): each for rank in range(workers)}
    assert all((result == workers * (workers + 1) // 2).all() for result in results)


def test_pieces_of_a_ring_may_differ_in_length():
    def work(group, rank):
        x = torch.arange(7.0) * (rank + 1)
        distributed.all_reduce(x, group=group)
        return x

    sent, results = counted(4, work)
    assert sum(sent.values()) == 2 * 3 * 7 * 4
    assert all(torch.equal(result, torch.arange(7.0) * 10) for result in results)


def test_the_largest_value_can_be_taken():
    def work(group, rank):
        x = torch.tensor([rank, -rank, 5])
        distributed.all_reduce(x, op=distributed.ReduceOp.MAX, group=group)
        return x.tolist()

    assert counted(3, work)[1] == [[2, 0, 5]] * 3


def test_all_to_all_sends_each_part_once():
    def work(group, rank):
        given = torch.tensor(
            [10 * rank, 10 * rank + 1, 10 * rank + 1, 10 * rank + 2], dtype=torch.uint8
        )
        out = torch.empty([3, 6, 3][rank], dtype=torch.uint8)
        parts = [1, 2, 1]
        all_to_all(out, given, group, [parts[rank]] * 3, parts).wait()
        return out.tolist()

    sent, results = counted(3, work)
    assert sent == {(0, 1): 2, (0, 2): 1, (1, 0): 1, (1, 2): 1, (2, 0): 1, (2, 1): 2}
    assert results == [[0, 10, 20], [1, 1, 11, 11, 21, 21], [2, 12, 22]]


@pytest.mark.parametrize("gather", ["ring", "direct"])
def test_all_gather(gather):
    def work(group, rank):
        out = torch.empty(12, dtype=torch.uint8)
        all_gather(out, torch.full((3,), rank, dtype=torch.uint8), group).wait()
        return out.tolist()

    sent, results = counted(4, work, gather=gather)
    assert results == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]] * 4
    if gather == "ring":
        assert sent == {(rank, (rank + 1) % 4): 9 for rank in range(4)}
    else:
        assert sent == {
            (sender, receiver): 3
            for sender in range(4)
            for receiver in range(4)
            if sender != receiver
        }


def test_groups_of_some_workers_use_their_ranks():
    wires = Wires()

    def work(rank):
        x = torch.ones(2)
        distributed.all_reduce(x, group=CountingGroup(wires, [rank % 2, rank % 2 + 2], rank))
        return x.tolist()

    assert run(4, work) == [[2, 2]] * 4
    assert dict(wires.bytes) == {(0, 2): 8, (2, 0): 8, (1, 3): 8, (3, 1): 8}
