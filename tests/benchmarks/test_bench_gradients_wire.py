"""Bytes on the wire: what each collective sends and does, that the count meets the formula, and
that the modes that were counted give the right mean."""

import bench_gradients_wire
import pytest
import torch
from bench_gradients_wire import CountingGroup, Wires, run
from torch import distributed

from lsq.dist.collectives import all_gather, all_to_all
from tests.dist import oracle

BUCKET = 4 * 256 * 8  # no padding with up to 8 workers


def counted(workers: int, work, **options) -> tuple[dict, list]:
    """(sender, receiver) -> bytes, and what work(group, rank) returned on each worker."""
    wires = Wires()
    groups = [CountingGroup(wires, range(workers), rank, **options) for rank in range(workers)]
    results = run(workers, lambda rank: work(groups[rank], rank))
    return dict(wires.bytes), results


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_ring_sends_twice_all_but_one_piece_to_the_next(workers, dtype):
    def work(group, rank):
        x = torch.full((24 * workers,), rank + 1).to(dtype)
        distributed.all_reduce(x, group=group)
        return x

    sent, results = counted(workers, work)
    each = 2 * (workers - 1) * 24 * dtype.itemsize
    assert sent == {(rank, (rank + 1) % workers): each for rank in range(workers)}
    assert all((result == workers * (workers + 1) // 2).all() for result in results)


def test_pieces_of_a_ring_may_differ_in_length_and_the_largest_value_can_be_taken():
    def work(group, rank):
        x, y = torch.arange(7.0) * (rank + 1), torch.tensor([rank, -rank, 5])
        distributed.all_reduce(x, group=group)
        distributed.all_reduce(y, op=distributed.ReduceOp.MAX, group=group)
        return [*x.tolist(), *y.tolist()]

    sent, results = counted(4, work)
    assert sum(sent.values()) == 2 * 3 * (7 * 4 + 3 * 8)
    assert results == [[10.0 * number for number in range(7)] + [3, 0, 5]] * 4


def test_all_to_all_sends_each_part_once():
    def work(group, rank):
        given = torch.tensor([0, 1, 1, 2], dtype=torch.uint8) + 10 * rank
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
        assert sent == {(a, b): 3 for a in range(4) for b in range(4) if a != b}


def test_groups_of_some_workers_use_their_ranks():
    wires = Wires()

    def work(rank):
        x = torch.ones(2)
        distributed.all_reduce(x, group=CountingGroup(wires, [rank % 2, rank % 2 + 2], rank))
        return x.tolist()

    assert run(4, work) == [[2, 2]] * 4
    assert dict(wires.bytes) == {(0, 2): 8, (2, 0): 8, (1, 3): 8, (3, 1): 8}


@pytest.mark.parametrize("mode", bench_gradients_wire.MODES)
@pytest.mark.parametrize("nodes, node_size", [(2, 2), (2, 4), (4, 2)])
def test_counted_as_the_formula_says(mode, nodes, node_size):
    across, _, results = bench_gradients_wire.count(mode, nodes, node_size, BUCKET)
    off = 0.03 if mode.startswith("lean") else 0.001  # the top and padding of so small messages
    assert across == pytest.approx(bench_gradients_wire.formula(mode, nodes, node_size), rel=off)
    assert all(torch.equal(result, results[0]) for result in results)


def test_formula_for_four_nodes_of_eight():
    wanted = {"bf16": 3.875, "gcq": 1.945, "int8": 7.078, "int8_hier": 1.523, "lean": 0.844}
    assert {mode: round(bench_gradients_wire.formula(mode, 4, 8), 3) for mode in wanted} == wanted


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("int8", lambda gradients: oracle.two_hop(gradients, 1 / 4)),
        ("int8_hier", lambda gradients: oracle.hierarchical(gradients, 2)),
        ("gcq", oracle.gcq),
    ],
)
def test_what_was_counted_is_the_mean(mode, expected):
    draw = [torch.Generator().manual_seed(rank) for rank in range(4)]
    gradients = [torch.randn(BUCKET, generator=one).numpy() for one in draw]
    _, _, results = bench_gradients_wire.count(mode, 2, 2, BUCKET)
    assert (results[3].numpy() == expected(gradients)).all()
