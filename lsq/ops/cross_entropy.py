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
from lsq.csrc.geometry import VECTOR
from lsq.csrc.launch import Product, check, float_define, launch
from lsq.ops import linear, rounding
from lsq.ops.kernels import check_columns, float_operand
from lsq.ops.registry import OpDefinition, register

BLOCK_ROWS = 256
"""Rows of float logits that exist at a time; those of codes are tuned."""
CUDA_BLOCK_ROWS = 1024
"""The same on CUDA."""


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
    """What a product of codes wants, or float logits of a block."""
    if x.dtype == torch.int8:
        return gemm.scratch_for("vocabulary_cross_entropy", x.shape[0], *weight.shape)
    return (min(x.shape[0], BLOCK_ROWS), weight.shape[0]), torch.float32


def _blocks(x, weight, scratch):
    """(first row, logits of a block in `scratch`) as int32 sums or floats."""
    if x.dtype == torch.int8:
        yield from gemm.row_blocks("vocabulary_cross_entropy", x, weight, scratch)
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


def _cuda_block_scratch(x, weight):
    columns = -(-weight.shape[0] // VECTOR) * VECTOR  # rows begin at multiples of 16 bytes
    return (min(x.shape[0], CUDA_BLOCK_ROWS), columns), torch.int32 if x.dtype == torch.int8 else torch.float32


def _cuda_weight(weight, narrow: tuple):
    """(what brings the weight to the dtype of x, where it has another, and that weight)."""
    if not narrow:
        return [], weight
    check_columns(8, **{"the width of a weight to convert": weight.shape[1]})
    return [float_operand(weight, None, narrow[0])], narrow[0]


def _cuda_blocks(x, weight, scratch):
    """(first row, rows, the product that makes their logits in `scratch`)."""
    total, columns = x.shape[0], weight.shape[0]
    blocks = max(1, -(-total // CUDA_BLOCK_ROWS))
    size = -(-total // blocks // VECTOR) * VECTOR or 1  # x must be aligned from every block's first row on
    for first in range(0, total, size):
        block = x[first : first + size]
        yield first, block.shape[0], Product(a=block, b=weight, out=scratch[: block.shape[0], :columns])


def _row_defines(x, x_scale, columns: int) -> dict[str, int]:
    """-D of kernels on rows of logits."""
    check(
        x_scale is None or columns % VECTOR == 0,
        f"a vocabulary of {columns} codes a row cannot run on CUDA: pad it to a multiple of {VECTOR}",
    )
    threads = 128
    while threads < 512 and threads * 2 * VECTOR < columns:
        threads *= 2
    return {"ROW_THREADS": threads, "KIND": 1 if x.dtype == torch.int8 else 2}


def cuda_scratch(x, x_scale, weight, weight_scale, target, key, **attributes):
    """As `scratch`, and the weight in the dtype of x, where it has another."""
    rows = ((x.shape[0],), torch.float32)
    return [_cuda_block_scratch(x, weight), rows, rows, *linear.float_cuda_scratch(x, weight)]


def cuda(
    x, x_scale, weight, weight_scale, target, key, loss, nll, normaliser, codes, row_scale, block, losses, nlls,
    *narrow, vocabulary, padding, smoothing, stream,
):
    columns = weight.shape[0]
    defines = _row_defines(x, x_scale, columns)
    threads = defines["ROW_THREADS"]
    check(codes is None or x_scale is not None, "the gradient of float logits is not rounded: leave out `stream`")
    target_weight, each = weights_of(vocabulary, smoothing)
    entries, weight = _cuda_weight(weight, narrow)
    for first, rows, product in _cuda_blocks(x, weight, block):
        kernel = launch(
            "cross_entropy.cu", "lsq_cross_entropy", block, x_scale, weight_scale, target, key, stream or 0,
            target_weight, each, padding, vocabulary, columns, block.shape[1], first, losses, nlls, normaliser,
            codes, row_scale, grid=rows, block=threads, **defines,
        )
        entries += [product, kernel]
    total = launch(
        "cross_entropy.cu", "lsq_sum_losses", losses, nlls, loss, nll, x.shape[0], grid=2, block=threads, **defines
    )
    return [*entries, total]


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


def gradient_cuda_scratch(x, x_scale, weight, weight_scale, target, normaliser, dloss, **attributes):
    return [_cuda_block_scratch(x, weight), *linear.float_cuda_scratch(x, weight)]


def gradient_cuda(
    x, x_scale, weight, weight_scale, target, normaliser, dloss, dlogits, block, *narrow,
    vocabulary, padding, smoothing, stream,
):
    columns = weight.shape[0]
    defines = _row_defines(x, x_scale, columns) | float_define(dlogits)
    target_weight, each = weights_of(vocabulary, smoothing)
    entries, weight = _cuda_weight(weight, narrow)
    for first, rows, product in _cuda_blocks(x, weight, block):
        kernel = launch(
            "cross_entropy.cu", "lsq_cross_entropy_gradient", block, x_scale, weight_scale, target, normaliser, dloss,
            target_weight, each, padding, vocabulary, columns, block.shape[1], first, dlogits, grid=rows,
            block=defines["ROW_THREADS"], **defines,
        )
        entries += [product, kernel]
    return entries


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
        name="vocabulary_cross_entropy", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate,
        scratch=scratch, cuda_scratch=cuda_scratch,
    )
)
register(
    OpDefinition(
        name="vocabulary_cross_entropy_gradient", reference=gradient_reference, cpu=gradient_cpu, cuda=gradient_cuda,
        scratch=gradient_scratch, cuda_scratch=gradient_cuda_scratch,
    )
)


def scale_rows_cuda(row_scale, factor, out):
    rows = out.numel()
    return [launch("cross_entropy.cu", "lsq_scale_rows", row_scale, factor, out, rows, grid=max(1, -(-rows // 256)))]


register(
    OpDefinition(
        name="scale_rows",
        reference=lambda row_scale, factor: (row_scale * factor,),
        cpu=lambda row_scale, factor, out: torch.mul(row_scale, factor, out=out),
        cuda=scale_rows_cuda,
    )
)
