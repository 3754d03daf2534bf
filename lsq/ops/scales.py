"""The scales of a pass that come from clips, written before anything is rounded.

Such a scale is known beforehand, but for a NaN among what is rounded; that of a row of a gated
block is not. A GPU that starts scales has no block wait for another one to write them: those that
meet a NaN write it. Programs for the CPU have none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

from lsq.native.launch import launch
from lsq.program.declare import Out
from lsq.program.operation import Operation
from lsq.program.values import Coded, StartedScale

TOGETHER = 16
"""Scales of one StartScales, at most; a layer of a decoder has 10."""


class StartScales(Operation):
    """Writes the scales of the operations after it, one launch for all: the first operation of a
    pass."""

    scale0: Out[StartedScale]
    scale1: Out[StartedScale] | None
    scale2: Out[StartedScale] | None
    scale3: Out[StartedScale] | None
    scale4: Out[StartedScale] | None
    scale5: Out[StartedScale] | None
    scale6: Out[StartedScale] | None
    scale7: Out[StartedScale] | None
    scale8: Out[StartedScale] | None
    scale9: Out[StartedScale] | None
    scale10: Out[StartedScale] | None
    scale11: Out[StartedScale] | None
    scale12: Out[StartedScale] | None
    scale13: Out[StartedScale] | None
    scale14: Out[StartedScale] | None
    scale15: Out[StartedScale] | None

    def reference(self):
        every = (getattr(self, f"scale{number}") for number in range(TOGETHER))
        return tuple(None if one is None else one.clip / one.largest for one in every)

    def cuda(self):
        return [launch("scales.cu", "lsq_start_scales", self, grid=1, block=32)]


def start_together(operations: Iterable[Operation]) -> list[Operation]:
    """Let all `operations` of a pass find their scales written; what writes them, to be run
    before."""
    every = (operation.rounding() for operation in operations)
    found = [rounded for rounded in every if isinstance(rounded, Coded) and not rounded.by_row]
    for rounded in found:
        rounded.started = True
    parts = (found[first : first + TOGETHER] for first in range(0, len(found), TOGETHER))
    return [
        StartScales(**{f"scale{number}": one.started_scale for number, one in enumerate(part)})
        for part in parts
    ]


def started(rounded: Coded | None) -> dict[str, int]:
    """-D of a kernel that rounds."""
    return {"STARTED": int(rounded is not None and rounded.started)}
