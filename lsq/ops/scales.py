"""The scales of a pass that follow from its clips, written before anything is rounded.

Such a scale is known beforehand, unless a rounded value is NaN. So a GPU writes all scales at the
beginning of a pass, no block waits for another, and a block that meets a NaN overwrites its scale.
The scale of a row of a gated block is not known beforehand. Programs for the CPU start no scales.
"""

from __future__ import annotations

from collections.abc import Iterable

from lsq.program.declare import Array, Out
from lsq.program.operation import Operation
from lsq.program.values import Coded, StartedScale


class StartScales(Operation):
    """Writes the scales of the operations after it: the first operation of a pass."""

    scales: Out[Array[StartedScale, 16]]
    """A layer of a decoder has 10."""

    def reference(self):
        return {"scales": [{"scale": scale.clip / scale.largest} for scale in self.scales]}


TOGETHER = StartScales.fields[0].count


def start_together(operations: Iterable[Operation]) -> list[Operation]:
    """Let all `operations` of a pass find their scales written; what writes them before."""
    every = (operation.rounding() for operation in operations)
    coded = [rounded for rounded in every if isinstance(rounded, Coded) and not rounded.by_row]
    for rounded in coded:
        rounded.started = True
    scales = [rounded.started_scale for rounded in coded]
    return [
        StartScales(scales=scales[first : first + TOGETHER])
        for first in range(0, len(scales), TOGETHER)
    ]
