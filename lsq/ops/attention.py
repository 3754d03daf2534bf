"""Attention over packed rows, from codes (or floats) where a projection wrote them to rows of the context.

    context = dropout(softmax(q k^T / sqrt(width))) v      for each sentence and each head

M rows of queries and S rows of keys lie sentence after sentence: sentence b has rows starts[b] .. starts[b + 1] - 1,
and starts[B] is M. Head h of the queries stands in columns q_column + h * width of their tensor, and so for keys and
values. A matrix of queries times keys is never held: the CPU takes blocks of queries against all keys of a sentence,
CUDA blocks of both with a running maximum and sum (FlashAttention-2, Dao 2023). The backward pass makes the
probabilities again.
"""

from __future__ import annotations

import math

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import VECTOR, row_defines
from lsq.csrc.launch import FLOATS, TICKET, Launch, check, float_define, launch
from lsq.ops import kernels
from lsq.ops.attention_reference import finished, heads_of, rows_of, sentences_of, tensor_of
from lsq.program.declare import Activations, Floats, In, Offsets, Out, factor, size
from lsq.program.operation import Operation, Spec
from lsq.program.values import Coded, Dropout, RoundedGradient

WIDEST = 128
"""Columns of a head on CUDA, at most."""
THREADS = 128
"""Of a block of the kernels that look at pairs of queries and keys."""


class Attention(Operation):
    """Context rows [M, heads * width]. A query that sees no key gets 0."""

    q: In[Coded] | None
    """[M, ...]; None where queries are floats. The same holds for keys and values."""
    k: In[Coded] | None
    """[S, ...]; in self-attention the tensor of `q`."""
    v: In[Coded] | None
    """[S, ...], the tensor of `k`."""
    q_floats: In[Activations] | None
    k_floats: In[Activations] | None
    v_floats: In[Activations] | None
    q_column: int
    k_column: int
    v_column: int
    starts: In[Offsets]
    """[B + 1], of queries."""
    key_starts: In[Offsets]
    """[B + 1], of keys."""
    heads: int
    width: int
    """Columns of a head."""
    causal: bool
    """Query i of a sentence sees its keys up to i + (keys - queries)."""
    dropout: In[Dropout] | None
    """Of probabilities: key j of row m and head h is element (m * heads + h) * longest + j."""
    longest: int
    """Keys of the longest sentence, rounded up to a multiple of 8."""
    out: Out[Activations] | None
    """[M, heads * width]"""
    rounded: Out[Coded] | None
    """[M, heads * width]"""
    log_sum: Out[Floats] | None
    """[M, heads], log of the sum of exp(score), for the backward pass."""

    @size
    def sentences(self) -> int:
        return self.starts.shape[0] - 1

    @size
    def rows(self) -> int:
        """M"""
        return tensor_of(self.q, self.q_floats).shape[0]

    @size
    def q_columns(self) -> int:
        """Of the tensor in which queries stand."""
        return tensor_of(self.q, self.q_floats).shape[1]

    @size
    def k_columns(self) -> int:
        return tensor_of(self.k, self.k_floats).shape[1]

    @size
    def v_columns(self) -> int:
        return tensor_of(self.v, self.v_floats).shape[1]

    def limits(self):
        return {"starts": self.rows, "key_starts": tensor_of(self.k, self.k_floats).shape[0]}

    def _values(self):
        context = torch.zeros(self.rows, self.heads * self.width)
        log_sum = torch.full((self.rows, self.heads), -math.inf)
        for one in sentences_of(self):
            context[one.queries] = rows_of(one.dropped(one.probabilities) @ (one.v * one.v_scale))
            log_sum[one.queries] = one.log_sum.T
        return context, log_sum

    def reference(self):
        context, log_sum = self._values()
        return context, *(self.rounded.encode(context) if self.rounded is not None else (None,) * 4), log_sum

    def cuda(self):
        return [
            launch(
                "attention.cu", "lsq_attention", self, TICKET, grid=_blocks(self, self.rows), block=THREADS,
                **_defines(self, self.out),
            )
        ]  # fmt: skip

    def gradient(self, builder) -> None:
        queries, keys = tensor_of(self.q, self.q_floats), tensor_of(self.k, self.k_floats)
        dq, dq_rounded = builder.product_gradient(queries)
        found = {"dq": dq, "dq_rounded": dq_rounded, "dq_sum": builder.bias_gradient(queries)}
        found["dq_clip"] = builder.parameter_gradient(self.q and self.q.clip)
        if keys is not queries:
            dkv, dkv_rounded = builder.product_gradient(keys)
            found |= {"dkv": dkv, "dkv_rounded": dkv_rounded, "dkv_sum": builder.bias_gradient(keys)}
            found["dkv_clip"] = builder.parameter_gradient(self.k and self.k.clip)
        read = {field.name: getattr(self, field.name) for field in self.fields if not field.derived}
        builder.add(
            AttentionGradient(
                dcontext=builder.gradient_sum(self.out, self.rounded and self.rounded.codes),
                **{name: value for name, value in read.items() if name not in ("out", "rounded")}, **found,
            )
        )  # fmt: skip


class AttentionGradient(Operation):
    """The gradients of the tensors in which queries, and keys and values, stand.

    Queries fill their tensor alone, and keys and values theirs; or all three fill one, whose gradient is `dq` then.
    """

    dcontext: In[Activations]
    """[M, heads * width]"""
    q: In[Coded] | None
    """As in Attention, with what straight-through gradients need."""
    k: In[Coded] | None
    v: In[Coded] | None
    q_floats: In[Activations] | None
    k_floats: In[Activations] | None
    v_floats: In[Activations] | None
    q_column: int
    k_column: int
    v_column: int
    starts: In[Offsets]
    key_starts: In[Offsets]
    heads: int
    width: int
    causal: bool
    dropout: In[Dropout] | None
    longest: int
    log_sum: In[Floats]
    """[M, heads]"""
    dq: Out[Activations] | None
    """Shaped as the tensor of `q`."""
    dq_rounded: Out[RoundedGradient] | None
    """The same, rounded."""
    dq_sum: Out[Floats] | None
    """Summed over rows: the gradient of the bias in the projection."""
    dq_clip: Out[Floats] | None
    """[1]"""
    dkv: Out[Activations] | None
    """Shaped as the tensor of `k`; neither this nor the next where `dq` holds everything."""
    dkv_rounded: Out[RoundedGradient] | None
    dkv_sum: Out[Floats] | None
    dkv_clip: Out[Floats] | None

    @size
    def sentences(self) -> int:
        return self.starts.shape[0] - 1

    @size
    def rows(self) -> int:
        """M"""
        return tensor_of(self.q, self.q_floats).shape[0]

    @size
    def key_rows(self) -> int:
        """S"""
        return tensor_of(self.k, self.k_floats).shape[0]

    @size
    def q_columns(self) -> int:
        return tensor_of(self.q, self.q_floats).shape[1]

    @size
    def k_columns(self) -> int:
        return tensor_of(self.k, self.k_floats).shape[1]

    @size
    def v_columns(self) -> int:
        return tensor_of(self.v, self.v_floats).shape[1]

    @factor
    def dq_factor(self) -> float:
        """Of the sum that is dq_clip."""
        return self.q.clip_factor if self.q is not None else 1.0

    @factor
    def dkv_factor(self) -> float:
        return self.k.clip_factor if self.k is not None else 1.0

    def limits(self):
        return {"starts": self.rows, "key_starts": self.key_rows}

    @property
    def _apart(self) -> bool:
        """Whether keys and values stand in another tensor than queries."""
        return self.dkv is not None or self.dkv_rounded is not None

    def reference(self):
        dq = torch.zeros(self.rows, self.q_columns)
        dkv = torch.zeros(self.key_rows, self.k_columns) if self._apart else dq
        for one in sentences_of(self):
            upstream = heads_of(self.dcontext[one.queries], self.heads)
            probabilities = one.probabilities
            slope = one.dropped(upstream @ (one.v * one.v_scale).transpose(1, 2))
            weighted = slope * probabilities
            dscores = weighted - probabilities * weighted.sum(dim=2, keepdim=True)
            for place, rows, column, gradient in (
                (dq, one.queries, self.q_column, dscores @ one.k * one.q_factor),
                (dkv, one.keys, self.k_column, dscores.transpose(1, 2) @ one.q * one.k_factor),
                (dkv, one.keys, self.v_column, one.dropped(probabilities).transpose(1, 2) @ upstream),
            ):
                place[rows, column : column + self.heads * self.width] = rows_of(gradient)
        of_q = finished(dq, self.q, self.dq_rounded)
        return *of_q, *(finished(dkv, self.k, self.dkv_rounded) if self._apart else (None,) * 5)

    def cpu_scratch(self) -> list[Spec]:
        """Gradients whose rows wait for the other heads before they are rounded."""
        found = [((self.rows, self.q_columns), torch.float32)] if self.dq_rounded is not None else []
        return found + [((self.key_rows, self.k_columns), torch.float32)] * (self.dkv_rounded is not None)

    def cpu(self, *scratch):
        waiting = iter(scratch)
        dq = next(waiting) if self.dq_rounded is not None else self.dq
        dkv = next(waiting) if self.dkv_rounded is not None else self.dkv
        loader.call("lsq_AttentionGradient", self, dq, dkv)

    def cuda_scratch(self) -> list[Spec]:
        """Sums of each row's weighted probabilities; gradients in float32, and sums over them for each tensor."""
        found = [((self.rows, self.heads), torch.float32), *self._sums_scratch(self.rows, self.q_columns)]
        return found + (self._sums_scratch(self.key_rows, self.k_columns) if self._apart else [])

    @staticmethod
    def _sums_scratch(rows: int, columns: int) -> list[Spec]:
        return [((rows, columns), torch.float32), kernels.partial_scratch(rows, columns, 1)]

    def cuda(self, sums, dq, partial, *of_keys):
        dkv, _ = of_keys or (dq, None)
        defines = _defines(self, self.dcontext, self.dq, self.dkv)
        entries = [
            launch(
                "attention.cu", f"lsq_attention_{side}_gradient", self, sums, gradient, grid=_blocks(self, rows),
                block=THREADS, **defines,
            )
            for side, rows, gradient in (("query", self.rows, dq), ("key", self.key_rows, dkv))
        ] + self._finish(0, dq, partial, self.dq_rounded, self.dq_sum, self.dq_clip)
        return entries + (self._finish(1, *of_keys, self.dkv_rounded, self.dkv_sum, self.dkv_clip) if of_keys else [])

    def _finish(self, keys: int, gradient, partial, rounded, total, clip) -> list[Launch]:
        """From float32 to what was asked for, a row at a time."""
        columns = gradient.shape[1]
        return [
            launch(
                "attention_rows.cu", "lsq_attention_gradient_rows", self, gradient, partial, grid=len(partial),
                KEYS=keys, ROUNDED=int(rounded is not None), FLOAT=FLOATS[self.dcontext.dtype], **row_defines(columns),
            ),
            kernels.finish_sums(partial, columns, (total,), clip, self.dkv_factor if keys else self.dq_factor),
        ]  # fmt: skip


def _blocks(operation, rows: int) -> tuple[int, int]:
    """Blocks of rows (see csrc/kernels/attention.cuh) and heads."""
    return rows // tile_rows(operation.width) + operation.sentences + 1, operation.heads


def tile_rows(width: int) -> int:
    """Queries or keys that a block on CUDA takes at a time.

    Raises:
        ValueError: kernels have no such heads.
    """
    check(
        width % VECTOR == 0 and 0 < width <= WIDEST,
        f"heads of {width} columns cannot run on CUDA: the width must be a multiple of {VECTOR}, up to {WIDEST}",
    )
    return 32 if width <= 64 else 16


def _defines(operation, *floats: torch.Tensor | None) -> dict[str, int]:
    """-D of a kernel on tiles."""
    found = [one for one in (operation.q_floats, operation.k_floats, operation.v_floats, *floats) if one is not None]
    return {"WIDTH": operation.width, "TILE": tile_rows(operation.width), **(float_define(*found) if found else {})}
