import dataclasses
import math

import pytest

from lsq.study import correlation
from lsq.study.costs import Costs, TensorCosts
from lsq.study.costs_table import table
from tests.study.test_costs import COST, COSTS


def costs_of(pairs) -> Costs:
    """Of tensors with (measured, second term) in one format."""
    tensors = tuple(
        TensorCosts(
            name=f"t{number}",
            kind="weight",
            shape=(2, 2),
            values=4,
            transposed=False,
            formats={"int4/row": dataclasses.replace(COST, cost=cost, first=0.0, second=second)},
        )
        for number, (cost, second) in enumerate(pairs)
    )
    return dataclasses.replace(COSTS, formats=("int4/row",), tensors=tensors)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 100), (3, 1000)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        (
            [(1, 1), (2, 3), (3, 2), (4, 5), (5, 4)],
            0.8,
        ),  # 1 - 6 sum d^2 / (n (n^2 - 1)) with sum d^2 = 4
        ([(1, 1), (1, 2), (2, 3)], math.sqrt(3) / 2),  # ranks 1.5, 1.5, 3 and 1, 2, 3
        ([(1, 1), (None, 0), (2, 2)], 1.0),
    ],
)
def test_rank_correlation(pairs, expected):
    assert correlation(costs_of(pairs), "weight", "second term") == pytest.approx(expected)


def test_no_rank_correlation_of_too_few():
    assert math.isnan(correlation(costs_of([(1, 1)]), "weight", "both terms"))
    assert math.isnan(correlation(costs_of([(1, 1), (1, 2)]), "weight", "both terms"))
    assert math.isnan(correlation(costs_of([(1, 1)]), "activation", "both terms"))


def test_table():
    lines = table(COSTS, "github").splitlines()
    assert lines[0] == "Loss 2.5000, a mean over 10; estimates from 3 gradients."
    assert [line.replace(" ", "") for line in lines[2:7]] == [
        "|costofweights|int4/row|nvfp4|",
        lines[3],
        "|a.weight|-0.25000|notfinite|",
        "|sum|-0.25000|notfinite|",
        "|bitsofavalue|4.50|4.50|",
    ]
    assert any(line.startswith("| cost of activations") for line in lines)
    assert (
        lines[8]
        == "Rank correlation of costs with their estimate: nan for second term, nan for both terms."
    )
