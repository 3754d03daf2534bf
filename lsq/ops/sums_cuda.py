"""Launches of lsq.ops.sums, and parts of sums that other kernels leave."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lsq.native.geometry import row_blocks
from lsq.native.launch import Launch, check, launch
from lsq.ops.sums import FinishSums, PartialSums, StartScales, SummedGradient
from lsq.program.cuda import Spec, launches
from lsq.program.declare import Declared
from lsq.program.values import Coded

COLUMNS = 32  # Columns that a block of lsq_finish_sums adds up.
PADDING = 4
"""Columns behind the sums in a row of parts, which keep it 16-byte aligned; the first: the clip."""


@launches.register(StartScales)
def launch_start_scales(op: StartScales):
    return launch("scales.cu", "lsq_start_scales", op, grid=1, block=32)


@launches.register(FinishSums)
def launch_finish_sums(op: FinishSums):
    strips = max(_strips(partial) for partial in op.sums)
    return launch("sums.cu", "lsq_finish_sums", op, grid=(strips, len(op.sums)))


def _strips(partial: PartialSums) -> int:
    return max(1, -(-partial.sums * partial.columns // COLUMNS))


def parts_of(rows: int, columns: int, sums: int = 1) -> Spec:
    return (row_blocks(rows, columns), sums * columns + PADDING), torch.float32


@dataclass(frozen=True)
class KernelSums:
    """Sums that a kernel leaves in parts; its own launch or the last of the pass adds them up."""

    holder: Declared  # Its `parts` is memory of the pass, or None.
    spec: Spec  # Shape and dtype of the parts.
    of: Callable[..., PartialSums]  # Makes PartialSums of parts.
    totals: tuple[str, ...] = ("sum", "clip")  # Fields of the holder with totals.

    @property
    def scratch(self) -> list[Spec]:
        return [] if self.holder.parts is not None else [self.spec]

    def take(self, scratch: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return the parts: the holder's, or the next of `scratch`.

        Raises:
            ValueError: memory was planned before other tuned files were named.
        """
        parts = next(scratch) if self.holder.parts is None else self.holder.parts
        check(
            tuple(parts.shape) == self.spec[0],
            f"parts of sums are {list(parts.shape)}, and products as they are tuned now leave"
            f" {list(self.spec[0])}: name tuned files before memory is planned",
        )
        return parts

    def leave(self, tensor: Callable) -> list[PartialSums]:
        """See Operation.leave_sums."""
        wanted = [total for total in self.of(None).totals if total is not None]
        if not wanted:
            return []
        self.holder.parts = tensor(wanted[0].name + ".parts", *self.spec)
        partial = self.of(self.holder.parts)
        for path in self.totals:
            *values, name = path.split(".")
            setattr(functools.reduce(getattr, values, self.holder), name, None)
        return [partial]

    def finish(self, parts: torch.Tensor) -> list[Launch]:
        """Return the launch that adds up parts; none if the pass does so, or no total is wanted."""
        return finish(self.of(parts)) if self.holder.parts is None else []


def finish(partial: PartialSums) -> list[Launch]:
    """Return the launch that adds up parts; none if no total is wanted."""
    if not partial.wanted:
        return []
    sizes = partial.sums, partial.columns, partial.blocks, partial.width, partial.clip_parts
    arguments = partial.parts, *partial.totals, *sizes, partial.factor
    return [launch("sums.cu", "lsq_finish_own_sums", *arguments, grid=_strips(partial))]


def gradient_sums(
    gradient: SummedGradient, rows: int, columns: int, coded: Coded | None
) -> KernelSums:
    return KernelSums(
        gradient, parts_of(rows, columns), lambda parts: gradient.partial(parts, columns, coded)
    )
