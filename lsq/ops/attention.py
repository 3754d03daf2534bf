"""Attention over packed rows, from codes (or floats) where a projection wrote them to rows of the
context.

    context = dropout(softmax(q k^T / sqrt(width))) v      for each sentence and each head

A matrix of queries times keys is never held: blocks of both meet, with a running maximum and sum
(FlashAttention-2, Dao 2023). The backward pass makes the probabilities again. Where sentences and
heads stand among the rows: see lsq.ops.heads.
"""

from __future__ import annotations

import math

import torch

from lsq.native import loader
from lsq.ops.heads import Heads, Projected, rows_of
from lsq.ops.sums import SummedGradient
from lsq.program.declare import Activations, Floats, In, Out
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded


class Attention(Operation):
    """Context rows [M, N * D].

    A query that sees no key gets 0, and so does a row behind all sentences.
    """

    heads: In[Heads]
    out: Out[Activations] | None
    """[M, N * D]"""
    rounded: Out[Coded] | None
    """[M, N * D]"""
    log_sum: Out[Floats] | None
    """[M, N], log of the sum of exp(score), for the backward pass."""

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
    """The gradients of the tensors in which queries, and keys and values, stand.

    Queries fill their tensor alone, and keys and values theirs; or all three fill one, whose
    gradient is `dq` then.
    """

    dcontext: In[Activations]
    """[M, N * D]"""
    heads: In[Heads]
    log_sum: In[Floats]
    """[M, N]"""
    dq: Out[SummedGradient]
    dkv: Out[SummedGradient] | None
    """None where `dq` holds everything."""
    dbias: Out[Floats] | None
    """[buckets, N], of the table of heads.bias."""

    def limits(self):
        return self.heads.limits()

    @property
    def sides(self) -> list[tuple[Projected, int, SummedGradient]]:
        """For each tensor: what stands in it, its rows, its gradient."""
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
            for place, rows, of, gradient in (
                (sums[0], one.queries, heads.q, dscores @ one.k * one.q_factor),
                (
                    sums[-1],
                    one.keys,
                    heads.k,
                    heads.of_keys(dscores.transpose(1, 2) @ one.q * one.k_factor),
                ),
                (
                    sums[-1],
                    one.keys,
                    heads.v,
                    heads.of_keys(one.dropped(probabilities).transpose(1, 2) @ upstream),
                ),
            ):
                place[rows, heads.columns_of(of)] = rows_of(gradient)
            if dbias is not None:
                dbias.index_add_(0, one.pairs.flatten(), dscores.flatten(1).t())
        found = [
            end.encode(total, one.rows.coded)
            for total, (one, _, end) in zip(sums, self.sides, strict=True)
        ]
        return {"dq": found[0], "dkv": found[-1], "dbias": dbias}

    def cpu_scratch(self) -> list[Spec]:
        """Gradients whose rows wait for the other heads before they are rounded."""
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
