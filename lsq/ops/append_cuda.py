"""Launches of lsq.ops.append."""

from lsq.native.geometry import THREADS
from lsq.native.launch import float_define, launch
from lsq.ops.append import Append
from lsq.program.cuda import launches

WORD = 16
"""Bytes that a thread of lsq_append copies at once, where rows are multiples of that."""


@launches.register(Append)
def launch_append(op: Append):
    out = op.out_floats if op.before is None else op.out
    words = op.columns * out.dtype.itemsize % WORD == 0
    units = out.numel() * out.dtype.itemsize // (WORD if words else out.dtype.itemsize)
    defines = (
        float_define(op.before_floats, op.now_floats, out) if op.before is None else {"CODES": 1}
    )
    grid = max(1, -(-units // THREADS))
    return [launch("elementwise.cu", "lsq_append", op, grid=grid, WORDS=int(words), **defines)]
