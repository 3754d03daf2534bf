"""Widths of nodes by their degree: a mapping from least degrees to bits, such as {0: 8, 16: 4}."""

from collections.abc import Mapping, Sequence

import torch

from lsq.quant import maximum_code


def widths_of(bits: int | Mapping[int, int]) -> dict[int, int]:
    """Return least degree -> bits, sorted. Raises ValueError: the degrees leave some nodes out, or
    a number of bits is not allowed."""
    widths = bits if isinstance(bits, Mapping) else {0: bits}
    if 0 not in widths or not all(isinstance(least, int) and least >= 0 for least in widths):
        raise ValueError(
            f"bits is {dict(widths)}; its keys are the least degrees of nodes: whole numbers, 0"
            " among them"
        )
    for width in widths.values():
        maximum_code(width)
    return dict(sorted(widths.items()))


def groups_of(degrees: torch.Tensor, least: Sequence[int]) -> torch.Tensor:
    """Return the position in the sorted `least`, from 0 on, of the width of each node."""
    bounds = torch.tensor(least, dtype=degrees.dtype, device=degrees.device)
    return torch.bucketize(degrees, bounds, right=True) - 1
