"""Means over workers."""

import torch

from lsq.dist.collectives import average
from tests.dist.processes import run


def averaged(rank: int) -> list[torch.Tensor]:
    tensors = [torch.full((3, 2), 1.0 + rank), torch.tensor(4.0 * rank), torch.zeros(0)]
    average(tensors, None)
    return tensors


def test_average():
    for found in run(averaged, 2):
        expected = [torch.full((3, 2), 1.5), torch.tensor(2.0), torch.zeros(0)]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
