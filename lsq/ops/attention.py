"""attention: softmax(q k^T + masks), dropout, times v; in floating point (Vaswani et al. 2017).

q float32 [B, N, T, D] (already scaled), k and v [B, N, S, D]; padding bool [B, S], True where a key is padding;
causal hides keys after the query. A query that sees no key at all gets NaN, as in PyTorch.
The backward pass computes the probabilities again instead of saving them.
"""

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import THREADS, VECTOR
from lsq.csrc.launch import Launch, Product, check, float_define, launch
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register

WIDEST = 8192
"""Keys that a row of scores on CUDA may have: the backward pass holds a row and its gradient in registers."""


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


def cuda_scratch(q, k, v, padding, key, *, causal, dropout, stream):
    """Scores, then probabilities after dropout; rows begin at multiples of 16 bytes."""
    batch, heads, time, _ = q.shape
    return [((batch * heads, time, -(-k.shape[2] // VECTOR) * VECTOR), q.dtype)]


def _row_defines(source: int) -> dict[str, int]:
    """-D of the threads that hold a row of scores, at 8 keys a thread where that is enough."""
    check(
        0 < source <= WIDEST,
        f"attention over {source} keys cannot run on CUDA: 1 to {WIDEST} are allowed; make the sequences "
        f"{'shorter' if source else 'longer'}",
    )
    lanes, vectors = 1, 1
    while lanes * vectors * VECTOR < source:
        if lanes < THREADS:
            lanes *= 2
        else:
            vectors *= 2
    return {"LANES": lanes, "VECTORS": vectors}


def _softmax(name: str, matrices: tuple, q, k, padding, key, causal, dropout, stream) -> Launch:
    """Launch a kernel on rows of scores, and of what else `matrices` holds, both as `cuda_scratch` has them."""
    batch, heads, time, _ = q.shape
    rows, source = batch * heads * time, k.shape[2]
    defines = _row_defines(source)
    return launch(
        "attention.cu", name, *matrices, padding, key, stream, dropout_threshold(dropout), keep_factor(dropout),
        int(causal), rows, heads, time, source, matrices[0].shape[2], grid=-(-rows * defines["LANES"] // THREADS),
        **defines, **float_define(q, *matrices),
    )


def _matrices(*tensors):
    """[B, N, ...] -> [B * N, ...]"""
    return (tensor.view(-1, *tensor.shape[2:]) for tensor in tensors)


def cuda(q, k, v, padding, key, context, scores, *, causal, dropout, stream):
    if not context.numel():
        return []
    softmax = _softmax("lsq_masked_softmax", (scores,), q, k, padding, key, causal, dropout, stream)
    q, k, v, context = _matrices(q, k, v, context)
    scores = scores[:, :, : k.shape[1]]
    return [Product(a=q, b=k, out=scores), softmax, Product(a=scores, b=v, out=context, transpose_b=True)]


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


def backward_cuda_scratch(gradient, q, k, v, padding, key, *, causal, dropout, stream):
    """What forward needs, and the gradient of it."""
    return 2 * cuda_scratch(q, k, v, padding, key, causal=causal, dropout=dropout, stream=stream)


def backward_cuda(gradient, q, k, v, padding, key, dq, dk, dv, scores, dscores, *, causal, dropout, stream):
    if not q.numel() and not k.numel():
        return []
    softmax = _softmax(
        "lsq_masked_softmax_backward", (scores, dscores), q, k, padding, key, causal, dropout, stream
    )
    gradient, q, k, v, dq, dk, dv = _matrices(gradient, q, k, v, dq, dk, dv)
    scores, dscores = (tensor[:, :, : k.shape[1]] for tensor in (scores, dscores))
    return [
        Product(a=q, b=k, out=scores),
        Product(a=gradient, b=v, out=dscores),
        softmax,
        Product(a=scores, b=gradient, out=dv, transpose_a=True, transpose_b=True),
        Product(a=dscores, b=k, out=dq, transpose_b=True),
        Product(a=dscores, b=q, out=dk, transpose_a=True, transpose_b=True),
    ]


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
    OpDefinition(
        name="attention", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate, scratch=scratch,
        cuda_scratch=cuda_scratch,
    )
)
register(
    OpDefinition(
        name="attention_backward", reference=backward_reference, cpu=backward_cpu, cuda=backward_cuda,
        scratch=backward_scratch, cuda_scratch=backward_cuda_scratch,
    )
)
