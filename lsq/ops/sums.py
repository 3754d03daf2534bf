"""Sums over rows that blocks of a GPU leave in parts, and the operation that finishes those of a
whole pass at once.

B blocks, each with a row of S sums over N columns side by side, then numbers for the clip. Programs
for the CPU have
none of this: its loops finish their sums themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from lsq.native.geometry import row_blocks
from lsq.native.launch import Launch, check, launch
from lsq.program.declare import Floats, In, Out, Value, extent
from lsq.program.operation import Operation, Spec
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded

PADDING = 4
"""Columns beyond its sums that a row of parts has; the clip's stands in the first, and rows stay
16-byte aligned."""
COLUMNS = 32
"""Columns that a block of lsq_finish_sums adds up."""
TOGETHER = 20
"""PartialSums of one FinishSums, at most; so many has a layer of a decoder."""


class PartialSums(Value):
    """What the blocks of one kernel have summed, and where the totals go, which are taken in the
    order of blocks."""

    parts: In[Floats]
    """[B, W], W at least S * N, and `clip_parts` more where there is a clip."""
    first: Floats | None
    """[N]"""
    second: Floats | None
    third: Floats | None
    clip: Floats | None
    """[1], taken in double precision, times `factor`."""
    sums: int
    """S, up to 3."""
    columns: int
    """N"""
    factor: float = 1.0
    clip_parts: int = 1
    """Numbers for the clip in each row: one of each block that has summed other columns of the same
    rows."""

    blocks = extent(0, "parts")
    width = extent(1, "parts")

    @classmethod
    def of(
        cls,
        parts,
        columns: int,
        outs: Sequence,
        clip=None,
        coded: Coded | None = None,
        clip_parts: int = 1,
    ) -> PartialSums:
        """Those of `columns` columns that go to `outs`, None for nowhere; `coded` was rounded under
        the clip."""
        first, second, third = (*outs, None, None, None)[:3]
        factor = 1.0 if coded is None else coded.clip_factor
        return cls(
            parts=parts,
            first=first,
            second=second,
            third=third,
            clip=clip,
            sums=len(outs),
            columns=columns,
            factor=factor,
            clip_parts=clip_parts,
        )

    @property
    def outs(self) -> tuple:
        """Where the totals go."""
        return self.first, self.second, self.third, self.clip

    @property
    def wanted(self) -> bool:
        """Whether any total is."""
        return any(one is not None for one in self.outs)

    @property
    def strips(self) -> int:
        """Blocks that add them up, on a GPU."""
        return max(1, -(-self.sums * self.columns // COLUMNS))

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Reference: what the written fields hold."""
        whole, width = self.parts.sum(dim=0), self.columns
        found = [whole[first * width : (first + 1) * width] for first in range(self.sums)]
        clip = None
        if self.clip is not None:
            first = self.sums * width
            clip = (
                self.parts[:, first : first + self.clip_parts].double().sum() * self.factor
            ).float()
        return *found, *(None,) * (3 - self.sums), clip


class FinishSums(Operation):
    """Adds up the parts that the operations before it have left, one launch for all: the last
    operation of a pass."""

    sums0: Out[PartialSums]
    sums1: Out[PartialSums] | None
    sums2: Out[PartialSums] | None
    sums3: Out[PartialSums] | None
    sums4: Out[PartialSums] | None
    sums5: Out[PartialSums] | None
    sums6: Out[PartialSums] | None
    sums7: Out[PartialSums] | None
    sums8: Out[PartialSums] | None
    sums9: Out[PartialSums] | None
    sums10: Out[PartialSums] | None
    sums11: Out[PartialSums] | None
    sums12: Out[PartialSums] | None
    sums13: Out[PartialSums] | None
    sums14: Out[PartialSums] | None
    sums15: Out[PartialSums] | None
    sums16: Out[PartialSums] | None
    sums17: Out[PartialSums] | None
    sums18: Out[PartialSums] | None
    sums19: Out[PartialSums] | None

    @classmethod
    def of(cls, found: Sequence[PartialSums]) -> FinishSums:
        """Of up to TOGETHER of them."""
        return cls(**{f"sums{number}": one for number, one in enumerate(found)})

    @property
    def found(self) -> list[PartialSums]:
        """All that there are."""
        every = (getattr(self, f"sums{number}") for number in range(TOGETHER))
        return [one for one in every if one is not None]

    def reference(self):
        found = [total for one in self.found for total in one.totals()]
        return *found, *(None,) * (4 * TOGETHER - len(found))

    def cuda(self):
        strips = max(one.strips for one in self.found)
        return [launch("sums.cu", "lsq_finish_sums", self, grid=(strips, len(self.found)))]


def parts_of(rows: int, columns: int, sums: int) -> Spec:
    """(shape, dtype) of what a kernel on M rows leaves of `sums` sums over them."""
    return (row_blocks(rows, columns), sums * columns + PADDING), torch.float32


def check_parts(parts: torch.Tensor, wanted: Spec) -> None:
    """Refuse parts that memory was planned for before other tuned files were named, which change
    who leaves them.

    Raises:
        ValueError: they have another shape than `wanted`.
    """
    check(
        tuple(parts.shape) == wanted[0],
        f"parts of sums are {list(parts.shape)}, and products as they are tuned now leave"
        f" {list(wanted[0])}: name "
        "tuned files before memory is planned",
    )


def finish(found: PartialSums, leaves: bool) -> list[Launch]:
    """What adds up parts at once, for an operation by itself; nothing where it `leaves` them, or
    nobody wants any."""
    if leaves or not found.wanted:
        return []
    return [
        launch(
            "sums.cu",
            "lsq_finish_own_sums",
            found.parts,
            *found.outs,
            found.sums,
            found.columns,
            found.blocks,
            found.width,
            found.clip_parts,
            found.factor,
            grid=found.strips,
        )
    ]


def as_parts(parts: torch.Tensor | None, found: PartialSums) -> torch.Tensor | None:
    """Reference: parts whose totals are the tensors in `found`, all in the first row."""
    if parts is None:
        return None
    made, (*sums, clip) = torch.zeros_like(parts), found.outs
    for number, total in enumerate(sums[: found.sums]):
        made[0, number * found.columns : (number + 1) * found.columns] = total
    if clip is not None:
        made[0, found.sums * found.columns] = clip / found.factor
    return made


def finish_together(
    operations: Iterable[Operation], tensor: Callable[..., VirtualTensor]
) -> list[Operation]:
    """Let all `operations` leave the sums that they can; what finishes them.

    Args:
        operations: virtual ones, of one pass.
        tensor: makes a virtual tensor of a name, a shape and a dtype.
    """
    found = [one for operation in operations for one in operation.leave_sums(tensor)]
    return [
        FinishSums.of(found[first : first + TOGETHER]) for first in range(0, len(found), TOGETHER)
    ]
