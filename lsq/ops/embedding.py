"""embedding: dropout(scale * weight[token] + position[place]), time-major.

V words, P positions, H hidden. The row of the padding token gets no gradient, as in torch.nn.Embedding.
"""

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import MANY_BLOCKS, THREADS, VECTOR, row_blocks, row_defines, rows_at_a_time
from lsq.csrc.launch import check, float_define, launch
from lsq.ops.kernels import zero
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register

WINDOW = 16
"""Occurrences of words that embedding.cu sums by themselves: its kWindow."""
SPLITS = 32
"""Parts in which the occurrences that stand before another are counted."""


def reference(tokens, places, weight, table, key, *, scale, padding, dropout, stream, learned):
    """tokens, places int64 [B, T], weight [V, H], table [P, H] -> x float32 [T * B, H]."""
    x = weight[tokens] * scale + table[places]
    return (drop(x.transpose(0, 1).reshape(-1, weight.shape[1]), dropout, key, stream),)


def cpu(tokens, places, weight, table, key, x, *, scale, padding, dropout, stream, learned):
    batch, time = tokens.shape
    loader.call(
        "lsq_embedding", tokens, places, weight, table, key, stream, dropout_threshold(dropout),
        keep_factor(dropout), float(scale), x, batch, time, weight.shape[1],
    )


def _is_activation(rows, x, what: str) -> int:
    """Whether a table has the dtype of the activations instead of float32, for -D."""
    check(
        rows.dtype in (torch.float32, x.dtype),
        f"{what} is {rows.dtype}; with activations in {x.dtype} it may be {torch.float32} or {x.dtype}: convert it",
    )
    return int(rows.dtype != torch.float32)


def _check_count(count: int) -> None:
    check(count < 2**31, f"{count} tokens cannot run on CUDA: at most {2**31 - 1} are allowed; use smaller batches")


def cuda(tokens, places, weight, table, key, x, *, scale, padding, dropout, stream, learned):
    batch, time = tokens.shape
    columns = weight.shape[1]
    _check_count(batch * time)
    return [
        launch(
            "embedding.cu", "lsq_embedding", tokens, places, weight, table, key, stream, dropout_threshold(dropout),
            keep_factor(dropout), float(scale), x, batch, time, weight.shape[0], table.shape[0],
            grid=row_blocks(batch * time, columns, most=MANY_BLOCKS), WEIGHT=_is_activation(weight, x, "weight"),
            TABLE=_is_activation(table, x, "the table of positions"), **float_define(x), **row_defines(columns),
        )
    ]


def backward_reference(
    gradient, tokens, places, key, *, scale, padding, dropout, stream, learned, vocabulary, positions
):
    """gradient float32 [T * B, H] -> dweight [V, H], dtable [P, H] (None unless learned)."""
    batch, time = tokens.shape
    gradient = drop(gradient, dropout, key, stream).view(time, batch, gradient.shape[1]).transpose(0, 1).flatten(0, 1)

    def scatter(indices, size, factor):
        kept = (tokens != padding).flatten()
        out = torch.zeros(size, gradient.shape[1])
        return out.index_add_(0, indices.flatten()[kept], gradient[kept] * factor)

    return scatter(tokens, vocabulary, scale), scatter(places, positions, 1.0) if learned else None


def backward_cpu(
    gradient, tokens, places, key, dweight, dtable,
    *, scale, padding, dropout, stream, learned, vocabulary, positions,
):
    batch, time = tokens.shape
    loader.call(
        "lsq_embedding_backward", gradient, tokens, places, key, stream, dropout_threshold(dropout),
        keep_factor(dropout), float(scale), padding, dweight, vocabulary, dtable, positions, batch, time,
        gradient.shape[1],
    )


def _blocks(count: int) -> int:
    """Blocks with a thread for each of `count`."""
    return -(-count // THREADS)


def backward_cuda_scratch(gradient, tokens, places, key, **attributes):
    """For each occurrence how many stand before it, by parts; the sorted occurrences; sums of words cut by windows."""
    count = tokens.numel()
    return [
        ((min(SPLITS, _blocks(count)), count), torch.int32), ((2, count), torch.int32),
        ((2 * -(-count // WINDOW), gradient.shape[1]), torch.float32),
    ]  # fmt: skip


def backward_cuda(
    gradient, tokens, places, key, dweight, dtable, before, ordered, partial,
    *, scale, padding, dropout, stream, learned, vocabulary, positions,
):
    batch, time = tokens.shape
    count, columns = batch * time, gradient.shape[1]
    defines = float_define(gradient) | row_defines(columns) | {"WINDOW": WINDOW}
    _check_count(count)

    def kernel(name, *arguments, grid):
        return launch("embedding.cu", name, *arguments, grid=grid, **defines)

    def scatter(indices, factor, out):
        rows = out.shape[0]
        if not count:
            return [zero(out)]
        splits, windows = before.shape[0], -(-partial.shape[0] // (2 * rows_at_a_time(columns)))
        strips = -(-columns // (VECTOR * defines["LANES"]))  # a block's share of the columns
        dropping = stream, dropout_threshold(dropout), keep_factor(dropout)
        return [
            zero(out),
            kernel(
                "lsq_rank_occurrences", tokens, indices, before, count, padding, rows, grid=(_blocks(count), splits)
            ),
            kernel(
                "lsq_sort_occurrences", tokens, indices, before, ordered, splits, batch, time, padding, rows,
                grid=_blocks(count),
            ),
            kernel(
                "lsq_sum_occurrences", gradient, ordered, key, *dropping, float(factor), out, partial, count,
                grid=(windows, strips),
            ),
            kernel("lsq_join_occurrences", ordered, partial, out, count, grid=(windows, strips)),
        ]

    return scatter(tokens, scale, dweight) + (scatter(places, 1.0, dtable) if dtable is not None else [])


def differentiate(builder, operation):
    tokens, places, weight, table, key = operation.inputs
    learned = operation.attributes["learned"]
    builder.emit(
        "embedding_backward",
        (builder.gradient(operation.outputs[0]), tokens, places, key),
        (builder.gradient_output(weight), builder.gradient_output(table) if learned else None),
        vocabulary=weight.shape[0], positions=table.shape[0], **operation.attributes,
    )


register(OpDefinition(name="embedding", reference=reference, cpu=cpu, cuda=cuda, differentiate=differentiate))
register(
    OpDefinition(
        name="embedding_backward", reference=backward_reference, cpu=backward_cpu, cuda=backward_cuda,
        cuda_scratch=backward_cuda_scratch,
    )
)
