"""Kernels for weights whose parameter is [inputs, outputs], as GPT-2 has them: codes, and the end
of a gradient.

K inputs, N outputs, P rows of codes. What multiplies reads codes [P, K] all the same; the product
of a gradient is made the other way round, [K, N], so that neither kernel writes across rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lsq.native.geometry import THREADS, row_blocks, row_defines, tiles
from lsq.native.launch import Launch, launch
from lsq.ops.kernels import check_columns
from lsq.ops.products import SUMS
from lsq.program.operation import Spec

if TYPE_CHECKING:
    from lsq.ops.rounding import RoundWeight
    from lsq.ops.weight_gradient import ProjectWeightGradient


def round_in_out(operation: RoundWeight) -> list[Launch]:
    """Codes in both layouts, and scales.

    Raises:
        ValueError: a size is no multiple of 16.
    """
    inputs, outputs, rows = operation.columns, operation.valid, operation.rows
    check_columns(
        16,
        **{
            "the width of a weight": inputs,
            "the outputs of a weight": outputs,
            "the rows of its codes": rows,
        },
    )
    source = "rounding_weight_in_out.cu"
    return [
        launch(source, "lsq_begin_weight_in_out", operation, grid=-(-rows // THREADS)),
        launch(source, "lsq_round_weight_in_out", operation, grid=tiles(inputs, rows)),
    ]


def clip_sums_in_out(operation: ProjectWeightGradient) -> Spec:
    """(shape, dtype) of the parts (lsq.ops.sums) that the kernel leaves of the gradients of
    clips."""
    blocks = row_blocks(operation.columns, operation.weight_rows)
    return (blocks, operation.weight_rows if operation.clips > 1 else 1), torch.float32


def end_in_out(
    operation: ProjectWeightGradient,
    product: torch.Tensor,
    input_scale: torch.Tensor | None,
    clip_sums: torch.Tensor,
) -> Launch:
    """What is done to the product [K, P] of a gradient, int32 or float32; input_scale [K] of int32.

    Raises:
        ValueError: P is not N, or rows of it cannot be held.
    """
    outputs = operation.weight_rows
    if product.shape[1] != outputs:
        raise ValueError(
            f"codes of a weight [inputs, outputs] have {product.shape[1]} rows; on CUDA they must"
            f" be its {outputs} "
            "outputs, and no more"
        )
    return launch(
        "weight_gradient_in_out.cu",
        "lsq_weight_gradient_in_out",
        operation,
        product if operation.rows else None,
        input_scale,
        clip_sums,
        grid=len(clip_sums),
        SUMS=0 if input_scale is None else SUMS[product.dtype],
        FLOAT=0,
        **row_defines(outputs),
    )
