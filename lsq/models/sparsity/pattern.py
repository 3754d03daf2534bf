"""Masks of the pattern 2:4. Shapes: N rows, K columns."""

import math

import torch

from lsq.quant.pruning import GROUP, KEPT, check_width


def choose(scores: torch.Tensor) -> torch.Tensor:
    """The mask bool [N, K] that keeps the two largest of each group of float or int scores [N, K].

    Of equal scores the first are kept. NaN counts as the largest, so that it stays visible.

    Raises:
        ValueError: K is no multiple of 4.
    """
    check_width("a matrix of scores", scores.shape[1])
    scores = (
        scores.nan_to_num(nan=math.inf, posinf=math.inf) if scores.is_floating_point() else scores
    )
    four = scores.unflatten(1, (-1, GROUP)).unbind(2)
    wins = [torch.zeros_like(one, dtype=torch.int8) for one in four]
    for first in range(GROUP):
        for later in range(first + 1, GROUP):
            won = four[first] >= four[later]
            wins[first] += won
            wins[later] += ~won
    return torch.stack([count >= GROUP - KEPT for count in wins], dim=2).flatten(1)


def is_sparse(matrix: torch.Tensor) -> bool:
    """Whether each group of four in [N, K] holds two values at most that are not 0, and K is a
    multiple of 4."""
    return matrix.shape[1] % GROUP == 0 and bool(
        ((matrix.unflatten(1, (-1, GROUP)) != 0).sum(2) <= KEPT).all()
    )
