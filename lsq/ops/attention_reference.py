"""Attention and its gradient in plain PyTorch, sentence after sentence; for lsq.ops.attention."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lsq.program.values import Coded, RoundedGradient


def tensor_of(coded: Coded | None, floats: torch.Tensor | None) -> torch.Tensor:
    """Where values stand."""
    return floats if coded is None else coded.codes


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """T queries and S keys of one sentence, all N heads: q [N, T, D], k and v [N, S, D], as codes or floats."""

    queries: slice
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    """[N, T, S], -infinity where a key is not seen."""
    hidden: torch.Tensor
    """bool [T, S]"""
    mask: torch.Tensor | None
    """[N, T, S], what dropout multiplies by."""
    q_factor: torch.Tensor | float
    """What one of dscores @ k is worth in dq."""
    k_factor: torch.Tensor | float
    v_scale: torch.Tensor | float

    @property
    def probabilities(self) -> torch.Tensor:
        """[N, T, S], 0 for a query that sees nothing."""
        return torch.where(self.hidden.all(dim=1)[:, None], 0.0, self.scores.softmax(dim=2))

    @property
    def log_sum(self) -> torch.Tensor:
        """[N, T], NaN with the probabilities."""
        return torch.where(self.probabilities.isnan().any(dim=2), math.nan, self.scores.logsumexp(dim=2))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mask is None else x * self.mask


def sentences_of(operation) -> Iterator[Sentence]:
    """What Attention or its gradient reads, sentence after sentence."""
    heads, width, longest = operation.heads, operation.width, operation.longest
    scale = [1.0 if one is None else one.scale for one in (operation.q, operation.k, operation.v)]
    share = torch.tensor(width**-0.5, dtype=torch.float32)
    mask = None
    if operation.dropout is not None:
        mask = operation.dropout.apply(torch.ones(operation.rows, heads, longest))
    starts, key_starts = operation.starts.tolist(), operation.key_starts.tolist()
    for queries, keys in zip(map(slice, starts, starts[1:]), map(slice, key_starts, key_starts[1:]), strict=True):
        q, k, v = (
            heads_of(tensor_of(coded, floats)[rows, column : column + heads * width].float(), heads)
            for coded, floats, rows, column in (
                (operation.q, operation.q_floats, queries, operation.q_column),
                (operation.k, operation.k_floats, keys, operation.k_column),
                (operation.v, operation.v_floats, keys, operation.v_column),
            )
        )
        scores = q @ k.transpose(1, 2) * (scale[0] * scale[1] * share)
        hidden = torch.full(scores.shape[1:], operation.causal).triu(1 + k.shape[1] - q.shape[1])
        yield Sentence(
            queries=queries, keys=keys, q=q, k=k, v=v, hidden=hidden,
            scores=scores.masked_fill(hidden, -math.inf), q_factor=scale[1] * share,
            k_factor=scale[0] * share, v_scale=scale[2],
            mask=None if mask is None else mask[queries, :, : k.shape[1]].transpose(0, 1),
        )


def heads_of(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, N * D] -> [N, T, D]"""
    return rows.view(rows.shape[0], heads, rows.shape[1] // heads).transpose(0, 1)


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """[N, T, D] -> [T, N * D]"""
    return values.transpose(0, 1).flatten(1)


def finished(gradient: torch.Tensor, coded: Coded | None, rounded: RoundedGradient | None) -> tuple:
    """The gradient before the rounding, the same rounded, its sum over rows, and that of the clip."""
    clip = torch.zeros(1)
    if coded is not None:
        gradient, clip = coded.straight_through(gradient)
    return gradient, *(rounded.encode(gradient) if rounded is not None else (None, None)), gradient.sum(dim=0), clip
