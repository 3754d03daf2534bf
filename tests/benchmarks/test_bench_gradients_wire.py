"""Bytes on the wire: the count meets the formula, and the modes that were counted give the right
mean."""

import bench_gradients_wire
import pytest
import torch

from tests.dist import oracle

BUCKET = 4 * 256 * 8  # no padding with up to 8 workers


@pytest.mark.parametrize("mode", bench_gradients_wire.MODES)
@pytest.mark.parametrize("nodes, node_size", [(2, 2), (2, 4), (4, 2)])
def test_counted_as_the_formula_says(mode, nodes, node_size):
    across, _, results = bench_gradients_wire.count(mode, nodes, node_size, BUCKET)
    assert across == pytest.approx(bench_gradients_wire.formula(mode, nodes, node_size), rel=0.001)
    assert all(torch.equal(result, results[0]) for result in results)


def test_formula_for_four_nodes_of_eight():
    wanted = {"bf16": 3.875, "gcq": 1.945, "int8": 7.078, "int8_hier": 1.523}
    assert {mode: round(bench_gradients_wire.formula(mode, 4, 8), 3) for mode in wanted} == wanted


@pytest.mark.parametrize("mode", ["int8", "int8_hier", "gcq"])
def test_what_was_counted_is_the_mean(mode):
    gradients = [
        torch.randn(BUCKET, generator=torch.Generator().manual_seed(rank)).numpy()
        for rank in range(4)
    ]
    wanted = {
        "int8": lambda: oracle.two_hop(gradients, 1 / 4),
        "int8_hier": lambda: oracle.hierarchical(gradients, 2),
        "gcq": lambda: oracle.gcq(gradients),
    }[mode]()
    _, _, results = bench_gradients_wire.count(mode, 2, 2, BUCKET)
    assert (results[3].numpy() == wanted).all()
