"""two_hop, within nodes and without, and gcq over gloo, bit for bit against the oracle; sizes
divide by nothing."""

import numpy
import pytest
import torch
from torch import distributed

from lsq.dist import two_hop
from lsq.dist.codec import Codec
from lsq.dist.gcq import GCQ
from lsq.dist.scratch import Scratch
from lsq.dist.two_hop import TwoHop, cut
from tests.dist import oracle
from tests.dist.processes import run

CPU = torch.device("cpu")
SIZES = (1, 31, 33, 1000, 4097, 20011)
DTYPES = (torch.float32, torch.bfloat16)
NODE_SIZE = 2


def codec(bits: int = 8, block: int = 128, stochastic: bool = False, seed: int = 0) -> Codec:
    return Codec(block=block, first_bits=bits, stochastic=stochastic, device=CPU, seed=seed)


def gradient(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(100 * rank + size)
    return (torch.randn(size) * torch.rand(size).exp()).to(dtype)


def node_groups(rank: int):
    first = rank // NODE_SIZE * NODE_SIZE
    neighbours = distributed.new_group(
        list(range(first, first + NODE_SIZE)), use_local_synchronization=True
    )
    across = distributed.new_group(
        list(range(rank % NODE_SIZE, 4, NODE_SIZE)), use_local_synchronization=True
    )
    return across, neighbours


def all_ways(rank: int) -> tuple:
    """Between four workers, between two nodes of two, and gcq."""
    scratch, world = Scratch(CPU), distributed.group.WORLD
    counterparts, neighbours = node_groups(rank)
    hierarchical = TwoHop(counterparts, codec(), scratch, neighbours)
    return TwoHop(world, codec(), scratch), hierarchical, GCQ(world, 1024, 0.99, scratch)


def averages(rank: int) -> dict[tuple, torch.Tensor]:
    """Every way of averaging, for every size and dtype."""
    scratch, world = Scratch(CPU), distributed.group.WORLD
    counterparts, neighbours = node_groups(rank)
    ways = {
        "int8": TwoHop(world, codec(), scratch),
        "int8, block 32": TwoHop(world, codec(block=32), scratch),
        "int8_hier": TwoHop(counterparts, codec(), scratch, neighbours),
        "int4_hier": TwoHop(counterparts, codec(bits=4), scratch, neighbours),
        "gcq": GCQ(world, 1024, 0.99, scratch),
        "gcq, largest": GCQ(world, 256, 1.0, scratch),
    }
    results = {}
    for name, way in ways.items():
        for size in SIZES:
            for dtype in DTYPES:
                buffer = gradient(rank, size, dtype)
                way.average(buffer)
                results[name, size, dtype] = buffer
    return results


def expected(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    rows = [gradient(rank, size, dtype).float().numpy() for rank in range(4)]
    ways = {
        "int8": lambda: oracle.two_hop(rows, 1 / 4),
        "int8, block 32": lambda: oracle.two_hop(rows, 1 / 4, block=32),
        "int8_hier": lambda: oracle.hierarchical(rows, NODE_SIZE),
        "int4_hier": lambda: oracle.hierarchical(rows, NODE_SIZE, first_largest=7),
        "gcq": lambda: oracle.gcq(rows),
        "gcq, largest": lambda: oracle.gcq(rows, row=256, quantile=1.0),
    }
    return torch.from_numpy(ways[name]()).to(dtype)


def test_means_are_the_oracles_on_every_worker():
    results = run(averages, 4)
    assert len(results[0]) == 6 * len(SIZES) * len(DTYPES)
    for case, found in results[0].items():
        assert all(torch.equal(found, other[case]) for other in results[1:]), (
            f"{case}: workers differ"
        )
        assert torch.equal(found, expected(*case)), f"{case}: not the oracle's"


def in_parts(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    two_hop.PART, results = 6000, []
    for way in all_ways(rank)[:2]:
        buffer, error = gradient(rank, 20011, torch.float32), torch.zeros(20011)
        way.average(buffer, error)
        results.append((buffer, error))
    return results


def test_parts_of_a_large_bucket_are_buckets_of_their_own():
    rows = [gradient(rank, 20011, torch.float32).numpy() for rank in range(4)]
    parts, found = cut(20011, 4), run(in_parts, 4)
    means = (
        lambda rows: oracle.two_hop(rows, 1 / 4),
        lambda rows: oracle.hierarchical(rows, NODE_SIZE),
    )
    for number, mean in enumerate(means):
        expected = numpy.concatenate(
            [mean([row[start : start + length] for row in rows]) for start, length in parts]
        )
        for result, error in (worker[number] for worker in found):
            assert torch.equal(result, torch.from_numpy(expected))
            assert all(error[start : start + length].any() for start, length in parts)


def errors_and_means(rank: int) -> list[tuple]:
    """(gradient, error, mean) of each way with error feedback."""
    ways = all_ways(rank)
    results = []
    for way in ways:
        given = gradient(rank, 4097, torch.float32)
        buffer, error = given.clone(), torch.zeros(4097)
        way.average(buffer, error)
        results.append((given, error, buffer))
    return results


def test_errors_are_what_the_first_rounding_took():
    results = run(errors_and_means, 4)
    for number, second_hop in enumerate((True, True, False)):
        of_workers = [worker[number] for worker in results]
        given, errors, means = (torch.stack(parts) for parts in zip(*of_workers, strict=True))
        sent = (given.double() - errors.double()).sum(0) / 4
        if second_hop:
            sent = torch.from_numpy(
                numpy.concatenate(
                    [oracle.rounded(shard) for shard in _owned(sent.float().numpy(), number)]
                )
            )[:4097]
        assert errors.abs().max() > 0
        assert (means[0] - sent).abs().max() <= 0.011 * means[0].abs().max()


def _owned(values: numpy.ndarray, number: int) -> list[numpy.ndarray]:
    """The shards that are rounded on the second hop, of two_hop (0) or of hierarchical (1)."""
    if number == 0:
        return oracle.shards(values, 4)
    return [
        shard
        for start, length in cut(4097, NODE_SIZE)
        for shard in _padded(values[start : start + length])
    ]


def _padded(piece: numpy.ndarray) -> list[numpy.ndarray]:
    return [
        shard[: max(0, len(piece) - place * len(shard))]
        for place, shard in enumerate(oracle.shards(piece, 2))
    ]


def poisoned(rank: int, value: float) -> list[torch.Tensor]:
    ways = all_ways(rank)
    buffers = [gradient(rank, 4097, torch.bfloat16) for _ in ways]
    for way, buffer in zip(ways, buffers, strict=True):
        if rank == 2:
            buffer[3333] = value
        way.average(buffer)
    return buffers


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_on_one_worker_is_not_finite_on_all(value):
    for buffers in run(poisoned, 4, value):
        for buffer in buffers:
            assert not buffer[3333].isfinite()
            assert buffer.isfinite().sum() >= 4097 - 1024  # and the rest is usable


def stochastic(rank: int) -> list[torch.Tensor]:
    way = TwoHop(distributed.group.WORLD, codec(bits=4, stochastic=True, seed=rank), Scratch(CPU))
    results = []
    for _ in range(40):
        buffer = gradient(rank, 1000, torch.float32)
        way.average(buffer)
        results.append(buffer)
    return results


def test_stochastic_rounding_is_without_bias_and_the_same_on_all_workers():
    first, second = run(stochastic, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    exact = torch.stack([gradient(rank, 1000, torch.float32) for rank in range(2)]).mean(0)
    one, mean_of_all = first[0] - exact, torch.stack(first).mean(0) - exact
    assert mean_of_all.norm() < 0.25 * one.norm()  # 40 draws: 0.16 if independent


def test_zero_gradients_stay_zero():
    for buffers in run(zeros, 2):
        assert not any(buffer.any() for buffer in buffers)


def zeros(rank: int) -> list[torch.Tensor]:
    scratch, world = Scratch(CPU), distributed.group.WORLD
    buffers = [torch.zeros(4097), torch.zeros(4097)]
    TwoHop(world, codec(), scratch).average(buffers[0])
    GCQ(world, 1024, 0.99, scratch).average(buffers[1])
    return buffers


@pytest.mark.parametrize(
    ("values", "pieces"), [(1, 1), (1, 8), (31, 2), (64, 2), (65, 2), (20011, 8)]
)
def test_pieces_cover_all_values_and_begin_aligned(values, pieces):
    found = cut(values, pieces)
    assert len(found) == pieces and sum(length for _, length in found) == values
    assert all(start % 32 == 0 or start == values for start, _ in found)
    assert [start for start, _ in found] == sorted(start for start, _ in found)
    assert found[0][1] == max(length for _, length in found)


def short_rows(rank: int) -> list[torch.Tensor]:
    """Means of 5, and of 1024 + 5, equal values under gcq: fewer than the 11 that lie outside the
    clip of a row."""
    found = []
    for values in (5, 1029):
        buffer = torch.full((values,), 1.0 + rank)
        GCQ(distributed.group.WORLD, 1024, 0.99, Scratch(CPU)).average(buffer)
        found.append(buffer[-5:])
    return found


def test_gcq_keeps_rows_of_few_values():
    for found in run(short_rows, 2):
        for mean in found:
            assert torch.allclose(mean, torch.full((5,), 1.5), rtol=0.05), mean
