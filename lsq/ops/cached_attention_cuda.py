"""Launches of lsq.ops.cached_attention."""

import torch

from lsq.native.launch import TICKET, launch
from lsq.ops.attention_cuda import check_width
from lsq.ops.cached_attention import CachedAttention
from lsq.ops.launches import started
from lsq.program.cuda import launches, scratch_of

THREADS = 128  # Threads of a block, which computes a head of a row.

BLOCKS = 512  # Blocks that keep a GPU busy; if rows * heads are fewer, several share a list.

LEAST = 256  # Fewest keys for which another block pays.

STATE = 4  # Floats that a block leaves beside its part of the context.


def _parts(op: CachedAttention) -> int:
    """Return the most blocks that share a list; only the GPU knows a list's length."""
    fewer = BLOCKS // max(1, op.rows * op.heads)
    return max(1, min(fewer, -(-op.capacity // LEAST)))


@scratch_of.register(CachedAttention)
def scratch_of_cached_attention(op: CachedAttention):
    parts = _parts(op)
    return [((op.rows * op.heads, parts, op.width + STATE), torch.float32)] if parts > 1 else []


@launches.register(CachedAttention)
def launch_cached_attention(op: CachedAttention, *scratch):
    check_width(op.width)
    grid = max(1, op.rows * op.heads), _parts(op)
    return launch(
        "cached_attention.cu",
        "lsq_cached_attention",
        op,
        TICKET,
        *(scratch or (None,)),
        grid=grid,
        block=THREADS,
        WIDTH=op.width,
        LEAST=LEAST,
        **started(op.context),
    )
