"""Launches of lsq.ops.calibration."""

import torch

from lsq.native.launch import TICKET, float_define, launch
from lsq.ops.calibration import LeastErrorClip
from lsq.program.cuda import launches, scratch_of

RUN, TOGETHER = 512, 11
"""Values that one warp sums; clips that are tried together (csrc/cuda/calibration.cu)."""

MOST_WARPS = 16  # Most warps of a block.

HELD = 8192  # Most values of a row in shared memory; longer rows use scratch memory.


@scratch_of.register(LeastErrorClip)
def scratch_of_least_error_clip(op: LeastErrorClip):
    return [] if op.sampled <= HELD else [((op.rows, op.sampled), torch.float32)]


@launches.register(LeastErrorClip)
def launch_least_error_clip(op: LeastErrorClip, sample=None):
    runs = -(-op.sampled // RUN)
    warps = min(MOST_WARPS, 2 ** (runs - 1).bit_length())
    floats = TOGETHER * (runs + 1) + (op.sampled if sample is None else 0)
    return launch(
        "calibration.cu",
        "lsq_least_error_clip",
        op,
        TICKET,
        sample,
        grid=op.rows,
        block=32 * warps,
        shared=4 * floats,
        WARPS=warps,
        **float_define(op.x),
    )
