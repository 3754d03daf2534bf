"""attention: softmax(q k^T + masks), dropout, times v; in floating point (Vaswani et al. 2017).

q float32 [B, N, T, D] (already scaled), k and v [B, N, S, D]; padding bool [B, S], True where a key is padding;
causal hides keys after the query. A query that sees no key at all gets NaN, as in PyTorch.
The backward pass computes the probabilities again instead of saving them.
"""

import torch

from lsq.csrc import loader
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register


def _probabilities(q, k, padding, causal):
    scores = q @ k.transpose(-1, -2)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(future, float("-inf"))
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
    return scores.softmax(dim=-1)


def reference(q, k, v, padding, key, *, causal, dropout, stream):
    """-> context float32 [B, N, T, D]."""
    return (drop(_probabilities(q, k, padding, causal), dropout, key, stream) @ v,)


def scratch(q, k, v, padding, key, *, causal, dropout, stream):
    """Probabilities, and the same after dropout."""
    batch, heads, time, _ = q.shape
    return [((batch * heads, time, k.shape[2]), torch.float32)] * (2 if dropout else 1)


def _dropped_probabilities(q, k, padding, key, scores, dropped, causal, dropout, stream):
    """Write the probabilities [B * N, T, S] over `scores`, and after dropout over `dropped`, which may be the same."""
    batch, heads, time, width = q.shape
    source = k.shape[2]
    torch.bmm(q.view(-1, time, width), k.view(-1, source, width).transpose(1, 2), out=scores)
    loader.call(
        "lsq_masked_softmax", scores, padding, key, stream, dropout_threshold(dropout), keep_factor(dropout),
        int(causal), dropped, batch, heads, time, source,
    )


def cpu(q, k, v, padding, key, context, *scores, causal, dropout, stream):
    dropped = scores[-1]
    _dropped_probabilities(q, k, padding, key, scores[0], dropped, causal, dropout, stream)
    torch.bmm(dropped, v.view(dropped.shape[0], -1, v.shape[-1]), out=context.view(dropped.shape[0], -1, v.shape[-1]))


def backward_reference(gradient, q, k, v, padding, key, *, causal, dropout, stream):
    """gradient of the context [B, N, T, D] -> dq, dk, dv."""
    probabilities = _probabilities(q, k, padding, causal)
    dv = drop(probabilities, dropout, key, stream).transpose(-1, -2) @ gradient
    dprobabilities = drop(gradient @ v.transpose(-1, -2), dropout, key, stream)
    weighted = dprobabilities * probabilities
    dscores = weighted - probabilities * weighted.sum(dim=-1, keepdim=True)
    return dscores @ k, dscores.transpose(-1, -2) @ q, dv


def backward_scratch(gradient, q, k, v, padding, key, *, causal, dropout, stream):
    """The gradient of the scores, and what forward needs."""
    forward = scratch(q, k, v, padding, key, causal=causal, dropout=dropout, stream=stream)
    return [forward[0], *forward]


def backward_cpu(gradient, q, k, v, padding, key, dq, dk, dv, dscores, *scores, causal, dropout, stream):
    batch, heads, time, width = q.shape
    source = k.shape[2]
    probabilities, dropped = scores[0], scores[-1]
    _dropped_probabilities(q, k, padding, key, probabilities, dropped, causal, dropout, stream)
    gradient, q, dq = (tensor.view(-1, time, width) for tensor in (gradient, q, dq))
    k, v, dk, dv = (tensor.view(-1, source, width) for tensor in (k, v, dk, dv))
    torch.bmm(dropped.transpose(1, 2), gradient, out=dv)
    torch.bmm(gradient, v.transpose(1, 2), out=dscores)
    loader.call(
        "lsq_softmax_backward", probabilities, key, stream, dropout_threshold(dropout), keep_factor(dropout), dscores,
        batch * heads * time, source,
    )
    torch.bmm(dscores, k, out=dq)
    torch.bmm(dscores.transpose(1, 2), q, out=dk)


def differentiate(builder, operation):
    q, k, v, padding, key = operation.inputs
    gradients = tuple(builder.temporary("d_" + tensor.name, tensor.shape) for tensor in (q, k, v))
    builder.emit(
        "attention_backward",
        (builder.gradient(operation.outputs[0]), builder.saved(q), builder.saved(k), builder.saved(v), padding, key),
        gradients,
        **operation.attributes,
    )
    for tensor, gradient in zip((q, k, v), gradients, strict=True):
        builder.accumulate(tensor, gradient)


register(
    OpDefinition(name="attention", reference=reference, cpu=cpu, differentiate=differentiate, scratch=scratch)
)
register(
    OpDefinition(
        name="attention_backward", reference=backward_reference, cpu=backward_cpu, scratch=backward_scratch
    )
)
