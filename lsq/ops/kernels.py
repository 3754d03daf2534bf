"""What the CUDA implementations of operations share: the defines of their kernels and the sums that blocks leave.

M rows, N columns. An operation's `cuda` takes what its `cpu` takes and returns launches instead of running them.
"""

import torch

from lsq.csrc.geometry import VECTOR, patches, row_blocks
from lsq.csrc.launch import FLOATS, Launch, check, float_define, launch
from lsq.ops import rounding
from lsq.ops.random import dropout_threshold, keep_factor

KINDS = {torch.int8: 0, torch.int32: 1}
"""-DKIND of a product by its dtype: codes, sums; anything else is Float."""
PADDING = 4
"""Columns beyond its sums that a partial row has: the clip's sum stands in the first; rows stay 16-byte aligned."""


def product_define(y: torch.Tensor | None) -> dict[str, int]:
    """-DKIND for a product, 2 where there is none."""
    return {"KIND": 2 if y is None else KINDS.get(y.dtype, 2)}


def activation_define(*tensors: torch.Tensor | None) -> dict[str, int]:
    """-DFLOAT for the activations among `tensors`: all but codes and sums; float32 where there are none.

    Raises:
        ValueError: they differ in dtype, or kernels have no such dtype.
    """
    floats = [tensor for tensor in tensors if tensor is not None and tensor.dtype not in KINDS]
    return float_define(*floats) if floats else {"FLOAT": FLOATS[torch.float32]}


def dropout_arguments(probability: float, stream: int) -> tuple[int, int, float]:
    """(stream, threshold, keep): what kernels want to know of a dropout, apart from its key."""
    return stream, dropout_threshold(probability), keep_factor(probability)


def clip_factor(error: torch.Tensor | None, bits: int) -> float:
    """What the sum of a clip's gradient is multiplied by: 1 (PACT), or the factor of LSQ where there is an `error`."""
    return 1.0 if error is None else rounding.lsq_factor(max(1, error.numel()), bits)


def destinations(out: torch.Tensor, clip: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(where a result goes as it is, where its codes go): under a clip, it is codes alone."""
    return (out, None) if clip is None else (None, out)


def partial_scratch(rows: int, columns: int, sums: int) -> tuple[tuple[int, int], torch.dtype]:
    """(shape, dtype) of the partial rows that a kernel on M rows leaves for `sums` sums over them."""
    return (row_blocks(rows, columns), sums * columns + PADDING), torch.float32


def finish_sums(partial: torch.Tensor, columns: int, outs: tuple, dclip: torch.Tensor | None, factor: float) -> Launch:
    """Add up partial rows [blocks, len(outs) * N + PADDING] into up to three results float32 [N] and dclip [1].

    Args:
        partial: what the blocks left.
        columns: N.
        outs: where each sum goes; None: nowhere.
        dclip: where the sum of the clip's parts goes, times `factor`, or None.
        factor: see rounding.lsq_factor.
    """
    blocks, width = partial.shape
    results = (*outs, None, None, None)[:3]
    return launch(
        "sums.cu", "lsq_finish_sums", partial, *results, dclip, blocks, columns, len(outs), width, float(factor),
        grid=max(1, -(-len(outs) * columns // 32)), block=256,
    )


def add_parts(partial: torch.Tensor, out: torch.Tensor | None, factor: float = 1.0) -> Launch:
    """out [1] = factor times the sum of `partial` float32 [parts], which is taken in double precision."""
    return launch(
        "sums.cu", "lsq_finish_sums", partial, None, None, None, out, partial.numel(), 0, 0, 1, float(factor),
        grid=1, block=256,
    )


def float_operand(values: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """out [M, N] = values [M, N], codes or floats, times scale [M], [1] or None, in the dtype of `out`."""
    return launch(
        "linear.cu", "lsq_float_operand", values, scale, out, 1 if scale is None else scale.numel(), *values.shape,
        grid=patches(*values.shape), FLOAT=FLOATS[out.dtype], FROM=FLOATS.get(values.dtype, 3),
    )


def zero(out: torch.Tensor) -> Launch:
    """Fill `out`, of any shape and dtype of activations, with zeros."""
    return launch(
        "linear.cu", "lsq_zero", out, out.numel(), grid=max(1, -(-out.numel() // (256 * VECTOR))),
        FLOAT=FLOATS[out.dtype],
    )


def check_columns(multiple: int, **columns: int) -> None:
    """Refuse widths that are no multiple of `multiple`, naming them.

    Raises:
        ValueError: a width is not.
    """
    for name, width in columns.items():
        check(
            width % multiple == 0,
            f"{name} is {width}; on CUDA it must be a multiple of {multiple}: choose other sizes, or the CPU",
        )
