"""two_hop, within nodes and without, and gcq over gloo, bit for bit against the oracle; sizes
divide by nothing."""

from functools import partial

import numpy
import pytest
import torch
from torch import distributed

from lsq.dist import two_hop
from lsq.dist.collectives import Scratch
from lsq.dist.gcq import GCQ
from lsq.dist.two_hop import CODECS, TwoHop, cut
from tests.dist import oracle
from tests.dist.processes import run

CPU = torch.device("cpu")
SIZES = (1, 31, 33, 1000, 4097, 20011)
DTYPES = (torch.float32, torch.bfloat16)
NODE_SIZE = 2
NAMES = ("int8", "int8_hier", "gcq", "lean", "lean5")


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
    """Between four workers, between two nodes of two, gcq, and the codec `lean`."""
    scratch, world = Scratch(CPU), distributed.group.WORLD
    counterparts, neighbours = node_groups(rank)
    hierarchical = TwoHop(counterparts, scratch, neighbours)
    lean = TwoHop(counterparts, scratch, neighbours, CODECS["lean"])
    lean5 = TwoHop(world, scratch, codec=CODECS["lean5"])
    return TwoHop(world, scratch), hierarchical, GCQ(world, scratch), lean, lean5


def averages(rank: int) -> dict[tuple, torch.Tensor]:
    """Every way of averaging, for every size and dtype."""
    results = {}
    for name, way in zip(NAMES, all_ways(rank), strict=True):
        for size in SIZES:
            for dtype in DTYPES:
                buffer = gradient(rank, size, dtype)
                way.average(buffer)
                results[name, size, dtype] = buffer
    return results


def lean(*bits: float) -> list:
    return [partial(oracle.lean, bits=one) for one in bits]


def expected(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    rows = [gradient(rank, size, dtype).float().numpy() for rank in range(4)]
    ways = {
        "int8": lambda: oracle.two_hop(rows, 1 / 4),
        "int8_hier": lambda: oracle.hierarchical(rows, NODE_SIZE),
        "gcq": lambda: oracle.gcq(rows),
        "lean": lambda: oracle.hierarchical(rows, NODE_SIZE, *lean(4, 5)),
        "lean5": lambda: oracle.two_hop(rows, 1 / 4, *lean(5, 5.5)),
    }
    return torch.from_numpy(ways[name]()).to(dtype)


def test_means_are_the_oracles_on_every_worker():
    results = run(averages, 4)
    assert len(results[0]) == len(NAMES) * len(SIZES) * len(DTYPES)
    for case, found in results[0].items():
        assert all(torch.equal(found, other[case]) for other in results[1:]), (
            f"{case}: workers differ"
        )
        assert torch.equal(found, expected(*case)), f"{case}: not the oracle's"


def lean_alone(rank: int) -> list[torch.Tensor]:
    way, found = TwoHop(distributed.group.WORLD, Scratch(CPU), codec=CODECS["lean"]), []
    for size in SIZES:
        found.append(gradient(rank, size, torch.float32))
        way.average(found[-1])
    return found


def test_lean_between_three_workers():
    first, *others = run(lean_alone, 3)
    for size, found, *rest in zip(SIZES, first, *others, strict=True):
        rows = [gradient(rank, size, torch.float32).numpy() for rank in range(3)]
        wanted = torch.from_numpy(oracle.two_hop(rows, 1 / 3, *lean(4, 5)))
        assert all(torch.equal(one, wanted) for one in (found, *rest)), size


def in_parts(rank: int) -> list[torch.Tensor]:
    two_hop.PART, results = 6000, []
    for way in all_ways(rank)[:2]:
        buffer = gradient(rank, 20011, torch.float32)
        way.average(buffer)
        results.append(buffer)
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
        for worker in found:
            assert torch.equal(worker[number], torch.from_numpy(expected))


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


def plain_values(rank: int) -> list[torch.Tensor]:
    """Means of zeros, and of 5 and of 1024 + 5 equal values: under gcq, fewer than the 11 that lie
    outside the clip of a row."""
    found = []
    for way in (TwoHop, GCQ):
        for buffer in (torch.zeros(4097), *(torch.full((n,), 1.0 + rank) for n in (5, 1029))):
            way(distributed.group.WORLD, Scratch(CPU)).average(buffer)
            found.append(buffer[-5:])
    return found


def test_zeros_stay_zero_and_rows_of_few_values_are_kept():
    for found in run(plain_values, 2):
        for mean, wanted in zip(found, [0.0, 1.5, 1.5] * 2, strict=True):
            assert torch.allclose(mean, torch.full((5,), wanted), rtol=0.05), mean
