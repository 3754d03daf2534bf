"""Masks of the pattern 2:4 against a search through all of them."""

import itertools
import math

import pytest
import torch

from lsq.models.sparsity import check_width, choose

PAIRS = [[number in pair for number in range(4)] for pair in itertools.combinations(range(4), 2)]
"""All masks of a group; of those that keep as much, the first one keeps what stands first."""


def best(group: list[float]) -> list[bool]:
    return max(
        PAIRS, key=lambda mask: sum(value for value, kept in zip(group, mask, strict=True) if kept)
    )


@pytest.mark.parametrize("shape", [(1, 4), (7, 12), (3, 40), (0, 8)])
def test_keeps_the_two_largest(shape):
    scores = torch.randint(
        0, 5, shape, generator=torch.Generator().manual_seed(1)
    ).float()  # with many ties
    groups = [best(group) for group in scores.reshape(-1, 4).tolist()]
    assert choose(scores).reshape(-1, 4).tolist() == groups
    assert torch.equal(choose(scores), choose(scores.to(torch.int8)))


def test_is_idempotent():
    scores = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).abs()
    mask = choose(scores)
    assert torch.equal(choose(scores * mask), mask)


def test_nan_and_infinity_are_kept():
    assert choose(torch.tensor([[1.0, math.inf, 2.0, math.nan]])).tolist() == [
        [False, True, False, True]
    ]
    assert choose(torch.full((1, 4), math.nan)).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("columns", "use"), [(0, 4), (3, 4), (18, 20)])
def test_widths_that_groups_do_not_fill(columns, use):
    with pytest.raises(
        ValueError, match=rf"fc1 has {columns} inputs, .* multiple of 4; use {use}$"
    ):
        check_width("fc1", columns)
    with pytest.raises(ValueError, match=f"use {use}"):
        choose(torch.zeros(2, columns))
