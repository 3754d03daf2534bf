"""Logits of a projection onto a vocabulary, a block of rows at a time: what the operations that make them share.

`op` is VocabularyLoss or its gradient. M rows, V words, P padded words, K inputs.
"""

from collections.abc import Iterator

import torch

from lsq import gemm
from lsq.csrc.geometry import VECTOR
from lsq.csrc.launch import Launch, Product, check
from lsq.ops.products import converted, converted_scratch
from lsq.program.operation import Spec

BLOCK_ROWS = 256
"""Rows of float logits that exist at a time; those of codes are tuned."""
CUDA_BLOCK_ROWS = 1024
"""The same on CUDA."""


def matrix(op) -> torch.Tensor:
    """The weight [P, K] that is multiplied."""
    return op.weight.values if op.x is None else op.weight.codes


def operand(op) -> torch.Tensor:
    """What it is multiplied with, [M, K]."""
    return op.floats if op.x is None else op.x.codes


def logits_of(op) -> torch.Tensor:
    """Reference: [M, V]."""
    if op.x is None:
        return (op.floats @ op.weight.values.t())[:, : op.vocabulary]
    sums = gemm.reference(op.x.codes, op.weight.codes).to(torch.float32)
    return (sums * (op.x.scale * op.weight.scale))[:, : op.vocabulary]


def cpu_block(op) -> Spec:
    """Memory for a block of logits on the CPU: what a product of codes wants, or floats."""
    if op.x is not None:
        return gemm.scratch_for("vocabulary_loss", op.rows, *matrix(op).shape)
    return (min(op.rows, BLOCK_ROWS), op.columns), torch.float32


def cpu_blocks(op, memory: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, logits of a block in `memory`) as int32 sums or floats."""
    if op.rows == 0:
        return
    if op.x is not None:
        yield from gemm.row_blocks("vocabulary_loss", op.x.codes, op.weight.codes, memory)
        return
    for first in range(0, op.rows, memory.shape[0]):
        rows = op.floats[first : first + memory.shape[0]]
        yield first, torch.mm(rows, op.weight.values.t(), out=memory[: rows.shape[0]])


def cuda_scratch(op) -> list[Spec]:
    """Memory for a block of logits, and for the weight in the dtype of `floats`, where it has another."""
    columns = -(-op.columns // VECTOR) * VECTOR  # rows begin at multiples of 16 bytes
    block = (min(op.rows, CUDA_BLOCK_ROWS), columns), torch.float32 if op.x is None else torch.int32
    return [block, *converted_scratch(matrix(op), operand(op).dtype)]


def cuda_blocks(op, memory: torch.Tensor, narrow: tuple, kernel) -> list[Launch | Product]:
    """For each block the product that makes its logits in `memory`, and kernel(first row, rows) that reads them."""
    x = operand(op)
    entries, weight = converted(matrix(op), None, x.dtype, iter(narrow))
    blocks = max(1, -(-op.rows // CUDA_BLOCK_ROWS))
    size = -(-op.rows // blocks // VECTOR) * VECTOR or 1  # x must be aligned from every block's first row on
    for first in range(0, op.rows, size):
        block = x[first : first + size]
        product = Product(a=block, b=weight, out=memory[: block.shape[0], : op.columns])
        entries += [product, kernel(first, block.shape[0])]
    return entries


def row_defines(op) -> dict[str, int]:
    """-D of kernels on rows of logits."""
    columns = op.columns
    check(
        op.x is None or columns % VECTOR == 0,
        f"a vocabulary of {columns} codes a row cannot run on CUDA: pad it to a multiple of {VECTOR}",
    )
    threads = 128
    while threads < 512 and threads * 2 * VECTOR < columns:
        threads *= 2
    return {"ROW_THREADS": threads, "KIND": 2 if op.x is None else 1}
