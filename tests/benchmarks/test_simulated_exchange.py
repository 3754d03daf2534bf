"""The simulation of many workers, against numbers that were computed by hand and the oracle of
lsq.dist's tests."""

import numpy
import pytest
import torch
from simulated_exchange import GCQ, Exact, Noisy, Ring, TwoHop, relative_error

from tests.dist import oracle


def mean(side, gradients) -> torch.Tensor:
    for gradient in gradients:
        side.add(gradient)
    return side.mean()


def random_gradients(workers: int, values: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(workers)
    return [
        torch.randn(values, generator=generator) * 10.0 ** (worker % 3) for worker in range(workers)
    ]


def test_four_workers_by_hand():
    # Each worker's shard is one block of 32 values: its scale is its largest magnitude by 127.
    gradients = [torch.zeros(128) for _ in range(4)]
    gradients[0][:3] = torch.tensor([127.0, 1.4, -1.6])  # scale 1: codes 127, 1, -2
    gradients[1][:3] = torch.tensor([254.0, 3.2, 2.6])  # scale 2: codes 127, 2, 1
    gradients[2][40] = 508.0  # the second worker's shard
    found = mean(TwoHop(4, 128), gradients)
    # Sums 381, 5, 0; means 95.25, 1.25, 0: scale 0.75, codes 127, 2, 0.
    wanted = torch.zeros(128)
    wanted[0], wanted[1], wanted[40] = 95.25, 1.5, 127.0
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workers, values", [(2, 1), (4, 341), (3, 4231)])
def test_two_hops_follow_the_oracle(workers, values):
    gradients = random_gradients(workers, values)
    wanted = oracle.two_hop([gradient.numpy() for gradient in gradients], 1 / workers)
    numpy.testing.assert_array_equal(mean(TwoHop(workers, values), gradients).numpy(), wanted)


@pytest.mark.parametrize("workers, node_size, values", [(4, 2, 341), (6, 3, 1000), (16, 8, 4231)])
def test_hierarchy_follows_the_oracle(workers, node_size, values):
    gradients = random_gradients(workers, values)
    wanted = oracle.hierarchical([gradient.numpy() for gradient in gradients], node_size)
    found = mean(TwoHop(workers, values, node_size=node_size), gradients)
    numpy.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("quantile", [0.99, 1.0])
def test_gcq_follows_the_oracle(quantile):
    gradients = random_gradients(4, 4231)
    wanted = oracle.gcq([gradient.numpy() for gradient in gradients], quantile=quantile)
    numpy.testing.assert_array_equal(
        mean(GCQ(4, 4231, quantile=quantile), gradients).numpy(), wanted
    )


def test_four_bits_at_random_are_right_on_average():
    gradients = random_gradients(64, 512)
    exact = mean(Exact(64, 512), gradients)
    coarse = mean(TwoHop(64, 512, bits=4, stochastic=True), gradients)
    assert 0.01 < relative_error(coarse, exact) < 0.15
    assert relative_error(mean(TwoHop(64, 512), gradients), exact) < 0.02


def test_a_ring_in_bfloat16_rounds_every_partial_sum():
    gradients = [
        torch.tensor([512.0]),
        torch.tensor([2.0]),
        torch.tensor([2.0]),
        torch.tensor([0.0]),
    ]
    # Quarters: 128, 0.5, 0.5. bfloat16 has steps of 1 from 128 on, and rounds halves to even.
    assert mean(Ring(4, 1), gradients).item() == 128
    assert mean(Exact(4, 1), gradients).item() == 129


def test_noise_has_the_size_of_one_rounding():
    torch.manual_seed(1)
    gradients = random_gradients(2, 256 * 100)
    exact = mean(Exact(2, 256 * 100), gradients)
    rounded = oracle.rounded(exact.float().numpy())
    ratio = relative_error(mean(Noisy(2, 256 * 100), gradients), exact) / relative_error(
        torch.tensor(rounded), exact
    )
    assert ratio == pytest.approx(1, abs=0.05)


def test_relative_error():
    assert relative_error(
        torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0], dtype=torch.float64)
    ) == pytest.approx(0.1)
