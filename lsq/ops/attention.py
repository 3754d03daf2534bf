"""Attention over packed rows, from codes (or floats) where a projection wrote them to rows of the
context.

    context = dropout(softmax(q k^T / sqrt(width))) v      for each sentence and each head

A matrix of queries times keys is never held: blocks of both meet, with a running maximum and sum
(FlashAttention-2, Dao 2023). The backward pass makes the probabilities again. Where sentences and
heads stand among the rows: see lsq.ops.heads.
"""

from __future__ import annotations

import functools
import math

import torch

from lsq.native import loader
from lsq.native.geometry import VECTOR, row_defines
from lsq.native.launch import FLOATS, TICKET, Launch, check, float_define, launch
from lsq.ops.heads import Heads, Projected, rows_of
from lsq.ops.scales import started
from lsq.ops.summed_gradient import SummedGradient
from lsq.ops.sums import PartialSums, finish, parts_of
from lsq.program.declare import Activations, Floats, In, Out
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded

WIDEST = 128
"""Columns of a head on CUDA, at most."""
TILE = 64
"""Queries or keys that a block takes at a time on CUDA, at most."""


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
        return (
            context,
            *(self.rounded.encode(context) if self.rounded is not None else (None,) * 5),
            log_sum,
        )

    def cuda(self):
        rows = tile_rows(self.heads)
        return [
            launch(
                "attention.cu",
                "lsq_attention",
                self,
                TICKET,
                block=threads(rows),
                grid=_blocks(self.heads, self.heads.rows, rows, self.heads.count),
                **_defines(self.heads, rows, self.out),
                **started(self.rounded),
            )
        ]

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
    def _sides(self) -> list[tuple[Projected, int, SummedGradient]]:
        """For each tensor: what stands in it, its rows, its gradient."""
        heads = self.heads
        found = [(heads.q, heads.rows, self.dq), (heads.k, heads.key_rows, self.dkv)]
        return found[:1] if self.dkv is None else found

    def reference(self):
        heads = self.heads
        sums = [torch.zeros(rows, one.columns, dtype=torch.float32) for one, rows, _ in self._sides]
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
            for total, (one, _, end) in zip(sums, self._sides, strict=True)
        ]
        return *found[0], *(found[1] if len(found) > 1 else (None,) * 6), dbias

    def leave_sums(self, tensor):
        return [
            left
            for one, rows, end in self._sides
            for left in end.leave_sums(tensor, rows, one.columns, one.rows.coded)
        ]

    def cpu_scratch(self) -> list[Spec]:
        """Gradients whose rows wait for the other heads before they are rounded."""
        return [
            ((rows, one.columns), torch.float32)
            for one, rows, end in self._sides
            if end.rounded is not None
        ]

    def cpu(self, *scratch):
        waiting = iter(scratch)
        sums = [
            next(waiting) if end.rounded is not None else end.floats for _, _, end in self._sides
        ]
        loader.call("lsq_AttentionGradient", self, *(*sums, None)[:2])

    def cuda_scratch(self) -> list[Spec]:
        """Sums of each row's weighted probabilities; gradients in float32, and sums over them for
        each tensor; what blocks add to the gradient of biases.
        """
        found = [((self.heads.rows, self.heads.count), torch.float32)]
        found += [((rows, one.columns), torch.float32) for one, rows, _ in self._sides]
        found += [
            parts_of(rows, one.columns, 1) for one, rows, end in self._sides if end.parts is None
        ]
        return found if self.dbias is None else [*found, self._bias_parts]

    @property
    def _bias_parts(self) -> Spec:
        heads = self.heads
        blocks, _ = _blocks(heads, heads.key_rows, tile_rows(heads, self.dcontext), 1)
        return (blocks, self.dbias.numel()), torch.float32

    def cuda(self, sums, *scratch):
        heads, sides = self.heads, len(self._sides)
        gradients, left = scratch[:sides], iter(scratch[sides:])
        of_biases = None if self.dbias is None else scratch[-1]
        dq, dkv = gradients[0], gradients[-1]
        rows = tile_rows(heads, self.dcontext)
        shared = shared_bytes(heads, rows, self.dcontext.dtype)
        defines = _defines(heads, rows, self.dcontext, *(end.floats for _, _, end in self._sides))
        of_queries, of_keys = (
            functools.partial(
                launch,
                "attention_gradient.cu",
                f"lsq_attention_{side}_gradient",
                self,
                sums,
                dq,
                grid=_blocks(heads, among, rows, count),
                block=threads(rows),
                shared=shared,
                SHARED=shared,
                **defines,
            )
            for side, among, count in (
                ("query", heads.rows, heads.count),
                ("key", heads.key_rows, heads.key_count),
            )
        )
        entries = [of_queries(), of_keys(dkv, of_biases)]
        if of_biases is not None:
            entries += finish(
                PartialSums.of(of_biases, self.dbias.numel(), (self.dbias,)), leaves=False
            )
        for keys, ((one, _, end), gradient) in enumerate(zip(self._sides, gradients, strict=True)):
            entries += self._finish(
                keys, one, end, gradient, next(left) if end.parts is None else end.parts
            )
        return entries

    def _finish(
        self, keys: int, one: Projected, end: SummedGradient, gradient, partial
    ) -> list[Launch]:
        """From float32 to what was asked for, a row at a time."""
        return [
            launch(
                "attention_rows.cu",
                "lsq_attention_gradient_rows",
                self,
                gradient,
                partial,
                grid=len(partial),
                KEYS=keys,
                ROUNDED=int(end.rounded is not None),
                FLOAT=FLOATS[self.dcontext.dtype],
                **row_defines(one.columns),
            ),
            *finish(end.sums(partial, one.columns, one.rows.coded), leaves=end.parts is not None),
        ]


def _blocks(heads: Heads, rows: int, tile: int, count: int) -> tuple[int, int]:
    """Blocks of rows (see csrc/cuda/attention.cuh) and of so many heads."""
    return rows // tile + heads.sentences + 1, count


def tile_rows(heads: Heads, *floats: torch.Tensor) -> int:
    """Queries or keys that a block on CUDA takes at a time: as many as its shared memory has room
    for.

    Args:
        heads: as they are read.
        floats: activations that are read beside them.

    Raises:
        ValueError: kernels have no such heads.
    """
    check_width(heads.width)
    wide = any(one.dtype == torch.float32 for one in (*_floats(heads), *floats))
    return TILE // ((1 + (heads.width > 64)) * (1 + wide))


def check_width(width: int) -> None:
    """Refuse heads that kernels do not have.

    Raises:
        ValueError: they have so many columns.
    """
    check(
        width % VECTOR == 0 and 0 < width <= WIDEST,
        f"heads of {width} columns cannot run on CUDA: the width must be a multiple of {VECTOR}, up"
        f" to {WIDEST}",
    )


def threads(rows: int) -> int:
    """Of a block: a warp for 16 rows of its tile."""
    return 2 * rows


def shared_bytes(heads: Heads, rows: int, dtype: torch.dtype) -> int:
    """Of a block that makes gradients: tiles of queries, keys, values and their context's gradient,
    in that dtype, and two of pairs, as bfloat16 parts of which rows are 16 bytes apart
    (csrc/cuda/attention_gradient.cu).
    """
    single = dtype == torch.float32
    of_float, of_pair = (3, 3) if single else (1, 2)
    operands = 3 * (of_float if _floats(heads) else 1) + of_float
    return rows * (operands * (-(-heads.width // 16) * 32 + 16) + 2 * of_pair * (2 * rows + 16))


def _floats(heads: Heads) -> list[torch.Tensor]:
    """Which of queries, keys and values are floats."""
    return [one.rows.floats for one in (heads.q, heads.k, heads.v) if one.rows.floats is not None]


def _defines(heads: Heads, tile: int, *floats: torch.Tensor | None) -> dict[str, int]:
    """-D of a kernel on tiles.

    Raises:
        ValueError: some of queries, keys and values are codes, others floats.
    """
    among = _floats(heads)
    check(
        len(among) in (0, 3),
        "queries, keys and values must all be codes, or all floats: round all three or none",
    )
    found = [one for one in (*among, *floats) if one is not None]
    bias = (
        {}
        if heads.bias is None
        else {"DISTANCES": heads.bias.distances, "BUCKETS": heads.bias.buckets}
    )
    floats = float_define(*found) if found else {}
    group = {"SHARING": heads.group} if heads.group > 1 else {}
    return {"WIDTH": heads.width, "TILE": tile, "CODED": int(not among), **group, **bias, **floats}
