"""vocabulary_cross_entropy: the projection onto the vocabulary, log-softmax and label smoothing, without the logits.

With logits l[v], p = softmax(l), smoothing e spread over all V words but counted as fairseq does, e' = e / (V - 1):

    nll = -log p[target];  smooth = -sum_v log p[v];  loss = (1 - e - e') * nll + e' * smooth
    dloss/dl[v] = (1 - e + (V - 1) * e') * p[v] - (1 - e - e') * 1[v = target] - e'

Rows whose target is padding count for nothing. Logits are made a block of rows at a time. Under backward="int8" the
forward pass already rounds their gradient and saves that, int8; otherwise only the normalisers are saved
and the backward pass makes the logits again (integer sums are exact, so they are the same).
M rows, V words, P padded words.
"""

import torch

from lsq import gemm
from lsq.csrc import loader
from lsq.ops import linear, rounding
from lsq.ops.registry import OpDefinition, register

BLOCK_ROWS = 256
"""Rows of logits that exist at a time."""


def weights_of(vocabulary: int, smoothing: float) -> tuple[float, float]:
    """(weight of the target's term, weight of every word's term), as fairseq's label_smoothed_nll_loss has them."""
    each = smoothing / (vocabulary - 1)
    return 1.0 - smoothing - each, each


def _logits(x, x_scale, weight, weight_scale, vocabulary):
    if x_scale is None:
        return x @ weight.t()
    sums = gemm.reference(x, weight).to(torch.float32)
    return (sums * (x_scale * weight_scale))[:, :vocabulary]


def _gradient(logits, normaliser, target, target_weight, each, padding, columns):
    """d loss / d logits [M, P], zero for padding."""
    total = target_weight + each * logits.shape[1]
    gradient = (logits - normaliser[:, None]).exp() * total - each
    gradient[torch.arange(len(target)), target] -= target_weight
    gradient = torch.where((target == padding)[:, None], 0.0, gradient)
    return torch.nn.functional.pad(gradient, (0, columns - logits.shape[1]))


def reference(x, x_scale, weight, weight_scale, target, key, *, vocabulary, padding, smoothing, stream):
    """-> loss [1], nll loss [1], log normaliser [M]; with a stream the gradient: codes int8 [M, P], row scale [M]."""
    logits = _logits(x, x_scale, weight, weight_scale, vocabulary)
    target_weight, each = weights_of(vocabulary, smoothing)
    normaliser = logits.logsumexp(dim=1)
    counted = target != padding
    nll = torch.where(counted, normaliser - logits[torch.arange(len(target)), target], 0.0)
    smooth = torch.where(counted, vocabulary * normaliser - logits.sum(dim=1), 0.0)
    loss = (target_weight * nll + each * smooth).sum().reshape(1)
    codes = row_scale = None
    if stream is not None:
        gradient = _gradient(logits, normaliser, target, target_weight, each, padding, weight.shape[0])
        codes, row_scale = rounding.round_rows(gradient, weight_scale, key, stream)
    return loss, nll.sum().reshape(1), normaliser, codes, row_scale


def _block_scratch(x, weight):
    shape, sums = gemm.block_scratch(x.shape[0], weight.shape[0], BLOCK_ROWS)
    return shape, sums if x.dtype == torch.int8 else torch.float32


def _blocks(x, weight, scratch):
    """(first row, logits of a block in `scratch`) as int32 sums or floats."""
    if x.dtype == torch.int8:
        yield from gemm.row_blocks(x, weight, scratch)
    else:
        for first in range(0, x.shape[0], scratch.shape[0]):
            block = x[first : first + scratch.shape[0]]
            yield first, torch.mm(block, weight.t(), out=scratch[: block.shape[0]])


def scratch(x, x_scale, weight, weight_scale, target, key, **attributes):
    """Logits of a block, and both losses of each row."""
    rows = ((x.shape[0],), torch.float32)
    return [_block_scratch(x, weight), rows, rows]


def cpu(
    x, x_scale, weight, weight_scale, target, key, loss, nll, normaliser, codes, row_scale, block, *losses,
    vocabulary, padding, smoothing, stream,
):
    columns = weight.shape[0]
    target_weight, each = weights_of(vocabulary, smoothing)
    scale = None if x_scale is None else x_scale * weight_scale
    for first, logits in _blocks(x, weight, block):
        loader.call(
            "lsq_cross_entropy", logits, 1 if x_scale is not None else 2, scale, target, weight_scale, key,
            stream or 0, target_weight, each, padding, vocabulary, columns, first, logits.shape[0],
            *losses, normaliser, codes, row_scale,
        )
    for total, each_row in zip((loss, nll), losses, strict=True):
        total.copy_(each_row.sum(dtype=torch.float64))


def gradient_reference(
    x, x_scale, weight, weight_scale, target, normaliser, dloss, *, vocabulary, padding, smoothing, stream
):
    """-> d logits float32 [M, P], for the gradient dloss [1]."""
    logits = _logits(x, x_scale, weight, weight_scale, vocabulary)
    target_weight, each = weights_of(vocabulary, smoothing)
    return (_gradient(logits, normaliser, target, target_weight, each, padding, weight.shape[0]) * dloss,)


def gradient_scratch(x, x_scale, weight, weight_scale, target, normaliser, dloss, **attributes):
    return [_block_scratch(x, weight)]


def gradient_cpu(
    x, x_scale, weight, weight_scale, target, normaliser, dloss, dlogits, block,
    *, vocabulary, padding, smoothing, stream,
):
    columns = weight.shape[0]
    target_weight, each = weights_of(vocabulary, smoothing)
    scale = None if x_scale is None else x_scale * weight_scale
    for first, logits in _blocks(x, weight, block):
        loader.call(
            "lsq_cross_entropy_gradient", logits, 1 if x_scale is not None else 2, scale, target, normaliser, dloss,
            target_weight, each, padding, vocabulary, columns, first, logits.shape[0], dlogits,
        )


def differentiate(builder, operation):
    x, x_scale, weight, weight_scale, target, _ = operation.inputs
    loss, _, normaliser, codes, row_scale = operation.outputs
    dloss = builder.gradient(loss)  # the nll loss is for the log: it has no gradient
    if codes is not None:
        scaled = builder.temporary("d_logits.row_scale", row_scale.shape)
        builder.emit("scale_rows", (row_scale, dloss), (scaled,))
        linear.emit_gradients(builder, (x, x_scale, weight, weight_scale), codes, scaled)
        return
    dlogits = builder.temporary("d_logits", (x.shape[0], weight.shape[0]))
    builder.emit(
        "vocabulary_cross_entropy_gradient", (x, x_scale, weight, weight_scale, target, normaliser, dloss), (dlogits,),
        **operation.attributes,
    )
    if x_scale is None:
        linear.emit_float_gradients(builder, x, weight, dlogits)
    else:
        linear.emit_gradients(builder, (x, x_scale, weight, weight_scale), dlogits, None)


register(
    OpDefinition(
        name="vocabulary_cross_entropy", reference=reference, cpu=cpu, differentiate=differentiate, scratch=scratch
    )
)
register(
    OpDefinition(
        name="vocabulary_cross_entropy_gradient", reference=gradient_reference, cpu=gradient_cpu,
        scratch=gradient_scratch,
    )
)
register(
    OpDefinition(
        name="scale_rows",
        reference=lambda row_scale, factor: (row_scale * factor,),
        cpu=lambda row_scale, factor, out: torch.mul(row_scale, factor, out=out),
    )
)
