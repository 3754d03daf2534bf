"""Launches of lsq.ops.scales."""

from lsq.native.launch import launch
from lsq.ops.scales import StartScales
from lsq.program.cuda import launches


@launches.register(StartScales)
def launch_start_scales(op: StartScales):
    return [launch("scales.cu", "lsq_start_scales", op, grid=1, block=32)]
