"""Launches of lsq.ops.compact_adam."""

import torch

from lsq.native.launch import launch
from lsq.ops.compact_adam import CompactAdam
from lsq.program.cuda import launches, scratch_of


@scratch_of.register(CompactAdam)
def scratch_of_compact_adam(op: CompactAdam):
    return [] if op.weight.codes is None else [(tuple(op.gradient.shape), torch.float32)]


@launches.register(CompactAdam)
def launch_compact_adam(op: CompactAdam, floats=None):
    return [launch("compact_adam.cu", "lsq_compact_adam", op, floats, grid=op.rows)]
