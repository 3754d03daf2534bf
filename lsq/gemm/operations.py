"""Operations with products of codes, and how long the inner dimension of such a product may be."""

import torch

OVER_TOKENS = "project_weight_gradient"
"""The operation whose k is the number of tokens; for all others it is m."""
TILED = ("project", "project_input_gradient", OVER_TOKENS)
"""Operations whose product and epilogue one GPU kernel can compute."""
TILED_ALONE = ("vocabulary_loss", "vocabulary_loss_gradient")
"""Operations whose product and epilogue one kernel always computes, since their sums are logits,
which must not be stored. They are not tuned."""
LARGEST_INNER = (2**31 - 1) // torch.iinfo(torch.int8).max ** 2
"""Largest inner dimension for which int32 sums of products of codes cannot overflow: 133,144."""
INNER_STEP = 64
"""Parts of longer inner dimensions begin at multiples of it."""


def is_long(op: str, k: int) -> bool:
    """Return whether an operation adds up K in parts, since int32 could not hold the sums."""
    return op in TILED and k > LARGEST_INNER


def inner_parts(k: int) -> list[slice]:
    """Return parts of an inner dimension whose int32 sums cannot overflow, as equal as multiples of
    INNER_STEP allow. Sums of several parts are converted to float32 and added in this order."""
    if k <= LARGEST_INNER:
        return [slice(0, k)]
    count = -(-k // (LARGEST_INNER // INNER_STEP * INNER_STEP))
    size = -(-k // (count * INNER_STEP)) * INNER_STEP
    return [slice(first, min(first + size, k)) for first in range(0, k, size)]
