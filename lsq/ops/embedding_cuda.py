"""Launches of lsq.ops.embedding."""

import torch

from lsq.native.geometry import (
    MANY_BLOCKS,
    THREADS,
    VECTOR,
    row_blocks,
    row_defines,
    rows_at_a_time,
)
from lsq.native.launch import Launch, check, float_define, launch
from lsq.ops.embedding import Embed, EmbedGradient
from lsq.ops.launches import zero
from lsq.program.cuda import launches, scratch_of
from lsq.program.operation import Operation, Spec

WINDOW = 16  # Occurrences of words in one partial sum: kWindow of embedding.cu.

SPLITS = 32  # Parts in which the earlier occurrences of a word are counted.


@launches.register(Embed)
def launch_embed(op: Embed):
    return launch(
        "embedding.cu",
        "lsq_embed",
        op,
        grid=row_blocks(op.rows, op.columns, most=MANY_BLOCKS),
        WINDOW=WINDOW,
        **float_define(op.x),
        **row_defines(op.columns),
    )


@scratch_of.register(EmbedGradient)
def scratch_of_embed_gradient(op: EmbedGradient):
    return scatter_scratch(op.rows, op.columns)


@launches.register(EmbedGradient)
def launch_embed_gradient(op: EmbedGradient, before, ordered, partial):
    tables = [out for out in (op.dweight, op.dtable) if out is not None]
    launches = scatter_launches(
        op, before, ordered, partial, tables=len(tables), **float_define(op.gradient)
    )
    return [*(zero(out) for out in tables), *launches]


def scatter_scratch(count: int, columns: int) -> list[Spec]:
    """Return the scratch memory of `scatter_launches` for `count` rows: earlier occurrences in each
    part, sorted occurrences, and sums of words that windows cut."""
    return [
        ((min(SPLITS, _blocks(count)), count), torch.int32),
        ((2, count), torch.int32),
        ((2 * -(-count // WINDOW), columns), torch.float32),
    ]


def scatter_launches(
    op: Operation,
    before: torch.Tensor,
    ordered: torch.Tensor,
    partial: torch.Tensor,
    *,
    tables: int,
    **defines: int,
) -> list[Launch]:
    """Return the launches that sum rows by word into each of the tables of `op` (embedding.cu)."""
    count, columns = op.rows, op.columns
    check(
        count < 2**31,
        f"{count} tokens cannot run on CUDA: at most {2**31 - 1} are allowed; use smaller batches",
    )
    if not count:
        return []
    defines |= row_defines(columns) | {"WINDOW": WINDOW}
    windows = -(-partial.shape[0] // (2 * rows_at_a_time(columns)))
    strips = -(-columns // (VECTOR * defines["LANES"]))  # a block's share of the columns
    splits = before.shape[0]

    def kernel(name, *arguments, grid):
        return launch("embedding.cu", name, op, *arguments, grid=grid, **defines)

    entries = []
    for table in range(tables):
        entries += [
            kernel("lsq_rank_occurrences", before, table, grid=(_blocks(count), splits)),
            kernel("lsq_sort_occurrences", before, ordered, splits, table, grid=_blocks(count)),
            kernel("lsq_sum_occurrences", ordered, partial, table, grid=(windows, strips)),
            kernel("lsq_join_occurrences", ordered, partial, table, grid=(windows, strips)),
        ]
    return entries


def _blocks(count: int) -> int:
    return -(-count // THREADS)
