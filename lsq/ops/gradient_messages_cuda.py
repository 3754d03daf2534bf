"""Launches of lsq.ops.gradient_messages."""

from lsq.native.geometry import THREADS, VECTOR
from lsq.native.launch import check, float_define, launch
from lsq.ops.gradient_messages import MessageLayout, PackGradients, SumMessages, UnpackGradients
from lsq.program.cuda import launches

WARP = 32

LARGEST_GRID = 65535  # Most blocks in the second dimension of a grid (CUDA).


@launches.register(PackGradients)
def launch_pack_gradients(op: PackGradients):
    layout = op.messages.layout
    return launch(
        "gradient_messages.cu",
        "lsq_pack_gradients",
        op,
        grid=_grid(layout, _vectors(layout)),
        BLOCK=layout.block,
        MANY=int(op.rows > 1),
        **float_define(op.x),
    )


@launches.register(SumMessages)
def launch_sum_messages(op: SumMessages):
    layout = op.messages.layout
    return launch(
        "gradient_messages.cu",
        "lsq_sum_messages",
        op,
        grid=_grid(layout, _vectors(layout))[0],
        BLOCK=layout.block,
    )


@launches.register(UnpackGradients)
def launch_unpack_gradients(op: UnpackGradients):
    layout = op.messages.layout
    return launch(
        "gradient_messages.cu",
        "lsq_unpack_gradients",
        op,
        grid=_grid(layout, 1),
        BLOCK=layout.block,
        MANY=int(op.copies > 1),
        **float_define(op.x),
    )


def _vectors(layout: MessageLayout) -> int:
    """Return the vectors of a thread; up to 32 threads share a block of values."""
    return max(1, layout.block // (WARP * VECTOR))


def _grid(layout: MessageLayout, vectors: int) -> tuple[int, int]:
    """Return the grid: blocks of a shard, and shards; a thread takes `vectors` vectors."""
    check(
        layout.shards <= LARGEST_GRID,
        f"{layout.shards} shards cannot be launched at once on CUDA; choose at most {LARGEST_GRID}",
    )
    return -(-layout.length // (THREADS * VECTOR * vectors)), layout.shards
