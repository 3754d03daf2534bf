"""Attentions of a few sentences, their gradients, and dense attention to compare with."""

import math

import torch

from lsq.ops.attention import Attention, AttentionGradient, Heads, PositionBias, Projected
from lsq.ops.sums import SummedGradient
from lsq.program.values import Rows
from lsq.quant import random
from tests.ops.compare import KEY, dropout_of, empty, on_reference
from tests.ops.compare import gradient_to_round as to_round_by_row
from tests.ops.compare import rounded as codes_of

LENGTHS = (1, 7, 0, 33, 64, 5)
OTHERS = (3, 40, 2, 0, 70, 1)
"""Keys of the same sentences in cross-attention."""
HEADS = 2


def offsets(lengths) -> torch.Tensor:
    """Where sentences of those lengths begin."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def values(rows: int, columns: int, coded: bool) -> Rows:
    """Codes or floats of about unit size; floats that bfloat16 has, too."""
    if coded:
        return Rows(coded=codes_of(rows, columns))
    return Rows(floats=torch.randn(rows, columns).bfloat16().float())


def bias_of(heads: int) -> PositionBias:
    """Of 7 buckets for distances up to 9."""
    bucket = torch.arange(-9, 10).clamp(-6, 6).div(2, rounding_mode="floor") + 3
    return PositionBias(table=torch.randn(7, heads), bucket=bucket)


def attention(
    lengths=LENGTHS,
    others=None,
    *,
    width=8,
    coded=True,
    causal=False,
    dropout=0.0,
    heads=HEADS,
    group=1,
    window=0,
    softmax_scale=0.0,
    biased=False,
    behind=0,
    to=None,
):
    """Self-attention, or cross-attention to keys of `others`; `to`: a Coded for the context;
    `behind`: rows of queries and of keys behind all sentences."""
    hidden, of_keys, rows = heads * width, heads * width // group, sum(lengths) + behind
    if others is None:
        q = k = values(rows, hidden + 2 * of_keys, coded)
    else:
        q, k = values(rows, hidden, coded), values(sum(others) + behind, 2 * of_keys, coded)
    keys, first = (lengths, hidden) if others is None else (others, 0)
    read = Heads(
        q=Projected(rows=q, column=0),
        k=Projected(rows=k, column=first),
        v=Projected(rows=k, column=first + of_keys),
        cu_seqlens=offsets(lengths),
        key_cu_seqlens=offsets(keys),
        count=heads,
        group=group,
        width=width,
        causal=causal,
        window=window,
        dropout=dropout_of(dropout),
        softmax_scale=softmax_scale,
        bias=bias_of(heads) if biased else None,
    )
    return Attention(
        heads=read,
        log_sum=empty(rows, heads),
        out=empty(rows, hidden) if to is None else None,
        rounded=to,
    )


def gradient_of(forward: Attention, *, to_rounded=False) -> AttentionGradient:
    """Its gradient, as floats or rounded, with all sums; the reference runs `forward`."""
    heads, asked = forward.heads, []
    for one in (heads.q, heads.k)[: 1 + (heads.q.rows.tensor is not heads.k.rows.tensor)]:
        shape = one.rows.tensor.shape
        gradient = {"rounded": to_round_by_row(*shape)} if to_rounded else {"floats": empty(*shape)}
        clip = empty(1) if one.rows.coded is not None else None
        asked.append(SummedGradient(**gradient, sum=empty(shape[1]), clip=clip))
    return AttentionGradient(
        dcontext=torch.randn(heads.rows, heads.count * heads.width),
        heads=heads,
        log_sum=on_reference(forward).log_sum,
        dbias=heads.bias and empty(*heads.bias.table.shape),
        **dict(zip(("dq", "dkv"), asked, strict=False)),
    )


def dense(operation, dtype):
    """Padded [B, N, T, S] attention on decoded values: leaves (of q, k, biases), context."""
    heads = operation.heads
    leaves = [
        (one.rows.tensor.to(dtype) * float(one.rows.scale)).requires_grad_()
        for one in (heads.q, heads.k)
    ]
    if heads.q.rows.tensor is heads.k.rows.tensor:
        leaves[1] = leaves[0]
    if heads.bias is not None:
        leaves.append(heads.bias.table.to(dtype).requires_grad_())
    of_q, of_k = (one.diff().tolist() for one in (heads.cu_seqlens, heads.key_cu_seqlens))
    width = heads.width

    def padded(rows, lengths, column, count):
        sentences = rows[:, column : column + count * width].split(lengths)
        whole = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
        return whole.unflatten(2, (-1, width)).transpose(1, 2)

    q = padded(leaves[0], of_q, heads.q.column, heads.count)
    count, shared = heads.count // heads.group, torch.arange(heads.count) // heads.group
    k, v = (padded(leaves[1], of_k, one.column, count) for one in (heads.k, heads.v))
    k, v = k[:, shared], v[:, shared]
    scores = q @ k.transpose(2, 3) * (heads.softmax_scale or width**-0.5)
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    ahead = torch.tensor([keys - queries for queries, keys in zip(of_q, of_k, strict=True)])
    distance = key - query - ahead[:, None, None]
    if heads.bias is not None:
        places = (distance + 9).clamp(0, 18)
        scores = scores + leaves[-1][heads.bias.bucket[places]].permute(0, 3, 1, 2)
    seen = (key < torch.tensor(of_k)[:, None, None]) & (distance > -(heads.window or 10**6))
    seen = (seen & (distance <= 0) if heads.causal else seen)[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    blind = ~seen.any(dim=3, keepdim=True)
    probabilities = scores.masked_fill(blind, 0.0).softmax(dim=3) * ~blind
    if heads.dropout is not None:
        row = torch.arange(sum(of_q))[:, None, None] * heads.count
        row = row + torch.arange(heads.count)[:, None]
        element = row * 2**31 + torch.arange(k.shape[2])
        dropout, ones = heads.dropout, torch.ones(element.shape)
        mask = random.dropout(ones, dropout.probability, KEY, dropout.subsequence, element)
        whole = torch.nn.utils.rnn.pad_sequence(mask.split(of_q), batch_first=True)
        probabilities = probabilities * whole.transpose(1, 2)
    context = (probabilities @ v).transpose(1, 2).flatten(2)
    return leaves, torch.cat([one[:length] for one, length in zip(context, of_q, strict=True)])
