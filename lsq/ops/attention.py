"""Attention over packed rows: codes (or floats) of projections become rows of the context.

    context = dropout(softmax(q k^T / sqrt(width))) v      for each sentence and each head

The matrix of all scores is never stored: blocks of queries and keys meet, with a running maximum
and sum (FlashAttention-2, Dao 2023). The backward pass computes the probabilities again. The
reference takes one sentence after another. `Append` adds keys and values of one more step of
generation.

M rows of queries and S rows of keys are packed: sentence b has the rows from cu_seqlens[b] to
cu_seqlens[b + 1] - 1. Rows from cu_seqlens[B] on belong to no sentence: their context and their
gradients are zeros. Head h of the queries begins in column q.column + h * width. G successive heads
of queries share a head of keys and of values (grouped-query attention, Ainslie et al. 2023): head h
reads the columns from k.column + h // G * width on. N heads, T queries and S keys of one sentence,
D columns of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lsq.native import loader
from lsq.ops.sums import SummedGradient
from lsq.program.declare import (
    Activations,
    Codes,
    Floats,
    In,
    Indices,
    Offsets,
    Out,
    Value,
    extent,
    size,
)
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded, Dropout, Rows

KEYS = 2**31
"""More keys than any sentence has; so dropout numbers are the same in any batch (kKeys)."""


class Projected(Value):
    """Queries, keys or values in the tensor that a projection wrote."""

    rows: In[Rows]  # [M, ...]; in the gradient with clip, clipped bits and error.
    column: int  # First column of the first head.

    columns = extent(1, "rows.tensor")


class PositionBias(Value):
    """Biases of scores by the distance between key and query (T5, Raffel et al. 2020)."""

    table: In[Floats]  # [buckets, N]
    bucket: In[Indices]
    """[2L + 1], buckets of keys from L before to L behind a query; farther keys have that of L."""

    buckets = extent(0, "table")
    distances = extent(0, "bucket")

    def of_pairs(self, queries: int, keys: int) -> torch.Tensor:
        """Reference: the bucket of each pair of query and key, int64 [T, S]."""
        distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
        limit = self.distances // 2
        return self.bucket[distance.clamp(-limit, limit) + limit]


class Heads(Value):
    """All heads of all sentences."""

    q: In[Projected]
    k: In[Projected]  # In the tensor of `q` in self-attention.
    v: In[Projected]  # In the tensor of `k`.
    cu_seqlens: In[Offsets]  # [B + 1], of queries.
    key_cu_seqlens: In[Offsets]
    """[B + 1], of keys; the longer of the two goes on with empty sentences."""
    count: int  # N, heads of queries.
    group: int = 1  # G, a divisor of N.
    width: int  # D.
    causal: bool  # Query i of a sentence sees its keys up to i + (keys - queries).
    window: int = 0
    """Query i of a sentence sees no key up to i + (keys - queries) - window; 0: all."""
    bias: In[PositionBias] | None
    softmax_scale: float = 0.0  # Factor of the product of query and key; 0: D ** -0.5.
    dropout: In[Dropout] | None
    """Dropout of probabilities: key j of row m, head h is element (m * count + h) * KEYS + j."""

    @size
    def sentences(self) -> int:
        """B."""
        return min(self.cu_seqlens.shape[0], self.key_cu_seqlens.shape[0]) - 1

    @size
    def key_count(self) -> int:
        """N / G, the heads of keys and of values."""
        return self.count // self.group

    rows = extent(0, "q.rows.tensor")  # M.
    key_rows = extent(0, "k.rows.tensor")  # S.

    def limits(self) -> dict[str, int]:
        """See Operation.limits."""
        found = {"heads.cu_seqlens": self.rows, "heads.key_cu_seqlens": self.key_rows}
        return found if self.bias is None else found | {"heads.bias.bucket": self.bias.buckets}

    def of_sentences(self) -> Iterator[Sentence]:
        """Reference: yield one sentence after another."""
        share = torch.tensor(self.softmax_scale or self.width**-0.5, dtype=torch.float32)
        both = self.cu_seqlens, self.key_cu_seqlens
        ends = (one[: self.sentences + 1].tolist() for one in both)
        of_both = (map(slice, one, one[1:]) for one in ends)
        for queries, keys in zip(*of_both, strict=True):
            q, k, v = (
                self.split(one.rows.tensor[rows, self.columns_of(one)].float())
                for one, rows in ((self.q, queries), (self.k, keys), (self.v, keys))
            )
            k, v = (one.repeat_interleave(self.group, dim=0) for one in (k, v))
            scores = q @ k.transpose(1, 2) * (self.q.rows.scale * self.k.rows.scale * share)
            pairs = None if self.bias is None else self.bias.of_pairs(*scores.shape[1:])
            if pairs is not None:
                scores = scores + self.bias.table[pairs].permute(2, 0, 1)
            ahead = k.shape[1] - q.shape[1]
            hidden = torch.full(scores.shape[1:], self.causal).triu(1 + ahead)
            hidden |= torch.full(scores.shape[1:], self.window > 0).tril(ahead - self.window)
            yield Sentence(
                queries=queries,
                keys=keys,
                q=q,
                k=k,
                v=v,
                hidden=hidden,
                scores=scores.masked_fill(hidden, -math.inf),
                q_factor=self.k.rows.scale * share,
                k_factor=self.q.rows.scale * share,
                v_scale=self.v.rows.scale,
                mask=self._mask(queries, scores),
                pairs=pairs,
            )

    def _mask(self, queries: slice, scores: torch.Tensor) -> torch.Tensor | None:
        """Factors of dropout for the probabilities of a sentence [N, T, S]."""
        if self.dropout is None:
            return None
        row = torch.arange(queries.start, queries.stop)[:, None]
        head = torch.arange(self.count)[:, None, None]
        element = (row * self.count + head) * KEYS + torch.arange(scores.shape[2])
        return self.dropout.apply(torch.ones(element.shape, dtype=torch.float32), element)

    def columns_of(self, one: Projected) -> slice:
        """Return the columns of all heads."""
        count = self.count if one is self.q else self.key_count
        return slice(one.column, one.column + count * self.width)

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, N * D] -> [N, T, D], of any N."""
        return rows.unflatten(1, (-1, self.width)).transpose(0, 1)

    def of_keys(self, each: torch.Tensor) -> torch.Tensor:
        """Sum gradients [N, S, D] of heads of queries over groups: [N / G, S, D]."""
        return each.unflatten(0, (self.key_count, self.group)).sum(dim=1)


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """[N, T, D] -> [T, N * D]"""
    return values.transpose(0, 1).flatten(1)


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One sentence, all heads: q [N, T, D], k and v [N, S, D], as codes or floats."""

    queries: slice
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor  # [N, T, S], -infinity where a key is not seen.
    hidden: torch.Tensor  # bool [T, S]
    mask: torch.Tensor | None  # [N, T, S], factors of dropout.
    pairs: torch.Tensor | None  # int64 [T, S], the bucket of each pair's bias.
    q_factor: torch.Tensor | float  # dq = dscores @ k * q_factor.
    k_factor: torch.Tensor | float
    v_scale: torch.Tensor | float

    @property
    def probabilities(self) -> torch.Tensor:
        """[N, T, S]; 0 for a query that sees no key."""
        return torch.where(self.hidden.all(dim=1)[:, None], 0.0, self.scores.softmax(dim=2))

    @property
    def log_sum(self) -> torch.Tensor:
        """[N, T]; NaN where a probability is NaN."""
        return torch.where(
            self.probabilities.isnan().any(dim=2), math.nan, self.scores.logsumexp(dim=2)
        )

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mask is None else x * self.mask


class Attention(Operation):
    """Context rows [M, N * D]; 0 for queries that see no key, and for rows behind all sentences."""

    heads: In[Heads]
    out: Out[Activations] | None  # [M, N * D]
    rounded: Out[Coded] | None  # [M, N * D]
    log_sum: Out[Floats] | None  # [M, N], log of the sum of exp(score), for the backward pass.

    def limits(self):
        return self.heads.limits()

    def reference(self):
        heads = self.heads
        context = torch.zeros(heads.rows, heads.count * heads.width, dtype=torch.float32)
        log_sum = torch.full((heads.rows, heads.count), -math.inf, dtype=torch.float32)
        for one in heads.of_sentences():
            context[one.queries] = rows_of(one.dropped(one.probabilities) @ (one.v * one.v_scale))
            log_sum[one.queries] = one.log_sum.T
        return {
            "out": context,
            "rounded": self.rounded and self.rounded.encode(context),
            "log_sum": log_sum,
        }

    def gradient(self, builder) -> None:
        q, k = self.heads.q, self.heads.k
        builder.add(
            AttentionGradient(
                dcontext=builder.gradient_sum(self.out, self.rounded and self.rounded.codes),
                heads=self.heads,
                log_sum=self.log_sum,
                dq=SummedGradient.of(q.rows, builder),
                dbias=builder.parameter_gradient(self.heads.bias and self.heads.bias.table),
                dkv=None if k.rows.tensor is q.rows.tensor else SummedGradient.of(k.rows, builder),
            )
        )


class AttentionGradient(Operation):
    """The gradients of the tensors that hold queries, keys and values.

    Queries fill one tensor, keys and values another. Or one tensor holds all: its gradient is `dq`.
    """

    dcontext: In[Activations]  # [M, N * D]
    heads: In[Heads]
    log_sum: In[Floats]  # [M, N]
    dq: Out[SummedGradient]
    dkv: Out[SummedGradient] | None  # None where `dq` holds everything.
    dbias: Out[Floats] | None  # [buckets, N], of the table of heads.bias.

    def limits(self):
        return self.heads.limits()

    @property
    def sides(self) -> list[tuple[Projected, int, SummedGradient]]:
        """(heads, rows, gradient) of each tensor."""
        heads = self.heads
        found = [(heads.q, heads.rows, self.dq), (heads.k, heads.key_rows, self.dkv)]
        return found[:1] if self.dkv is None else found

    def reference(self):
        heads = self.heads
        sums = [torch.zeros(rows, one.columns, dtype=torch.float32) for one, rows, _ in self.sides]
        dbias = None if heads.bias is None else torch.zeros_like(heads.bias.table)
        for one in heads.of_sentences():
            upstream = heads.split(self.dcontext[one.queries])
            probabilities = one.probabilities
            slope = one.dropped(upstream @ (one.v * one.v_scale).transpose(1, 2))
            weighted = slope * probabilities
            dscores = weighted - probabilities * weighted.sum(dim=2, keepdim=True)
            dq = dscores @ one.k * one.q_factor
            dk = heads.of_keys(dscores.transpose(1, 2) @ one.q * one.k_factor)
            dv = heads.of_keys(one.dropped(probabilities).transpose(1, 2) @ upstream)
            sums[0][one.queries, heads.columns_of(heads.q)] = rows_of(dq)
            for of, gradient in ((heads.k, dk), (heads.v, dv)):
                sums[-1][one.keys, heads.columns_of(of)] = rows_of(gradient)
            if dbias is not None:
                dbias.index_add_(0, one.pairs.flatten(), dscores.flatten(1).t())
        found = [
            end.encode(total, one.rows.coded)
            for total, (one, _, end) in zip(sums, self.sides, strict=True)
        ]
        return {"dq": found[0], "dkv": found[-1], "dbias": dbias}

    def cpu_scratch(self) -> list[Spec]:
        """Return memory for gradients whose rows are rounded once all heads have added to them."""
        return [
            ((rows, one.columns), torch.float32)
            for one, rows, end in self.sides
            if end.rounded is not None
        ]

    def cpu(self, *scratch):
        waiting = iter(scratch)
        sums = [
            next(waiting) if end.rounded is not None else end.floats for _, _, end in self.sides
        ]
        loader.call("lsq_AttentionGradient", self, *(*sums, None)[:2])


class Append(Operation):
    """B sentences of P rows, with one more row behind each: codes, or floats in float mode."""

    before: In[Codes] | None  # [B * P, W]
    now: In[Codes] | None  # [B, W]
    before_floats: In[Activations] | None
    now_floats: In[Activations] | None
    batch: int  # B
    out: Out[Codes] | None  # [B * (P + 1), W]
    out_floats: Out[Activations] | None

    @property
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        floats = self.before_floats, self.now_floats
        return floats if self.before is None else (self.before, self.now)

    @size
    def past(self) -> int:
        """P."""
        return self._operands[0].shape[0] // max(1, self.batch)

    columns = extent(1, "now", "now_floats")  # W.

    def reference(self):
        before, now = self._operands
        rows = [
            before.view(self.batch, self.past, self.columns),
            now.view(self.batch, 1, self.columns),
        ]
        out = torch.cat(rows, dim=1).view(-1, self.columns)
        return {"out": out, "out_floats": out}
