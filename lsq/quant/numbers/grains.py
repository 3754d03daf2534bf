"""Which values share a scale."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

ALLOWED = (
    "tensor, row, channel (a column), group16 (so many columns of a row), block4x16 (rows"
    " and"
    " columns)"
)


@dataclass(frozen=True)
class Grain:
    """A matrix [R, C] is cut into blocks of `rows` rows and `columns` columns, each with a scale;
    None: all there are.

    The last blocks may be smaller. Tensors of another number of dimensions are matrices of their
    last one.
    """

    rows: int | None
    columns: int | None

    TENSOR: ClassVar["Grain"]
    ROW: ClassVar["Grain"]
    CHANNEL: ClassVar["Grain"]
    """A column."""

    def __post_init__(self) -> None:
        if not all(
            size is None or isinstance(size, int) and size > 0 for size in (self.rows, self.columns)
        ):
            raise ValueError(
                f"blocks of {self.rows!r} rows and {self.columns!r} columns; give whole numbers"
                " from 1 on, or None for "
                "all there are"
            )

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Blocks of a matrix [R, C]: (down, across); none where it has no values."""
        if 0 in shape:
            return 0, 0
        rows, columns = self._sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Blocks [B, N] of a matrix [R, C], row by row, and bool [B, N] of what lies in the matrix.

        Blocks that reach out of it are filled up with zeros; no bool where none does.
        """
        rows, columns = self._sizes(matrix.shape)
        down, across = self.grid(matrix.shape)
        padding = (0, across * columns - matrix.shape[1], 0, down * rows - matrix.shape[0])

        def cut(padded: Tensor) -> Tensor:
            return (
                padded.view(down, rows, across, columns)
                .transpose(1, 2)
                .reshape(down * across, rows * columns)
            )

        if not any(padding):
            return cut(matrix.contiguous()), None
        inside = torch.ones(matrix.shape, dtype=torch.bool, device=matrix.device)
        return cut(torch.nn.functional.pad(matrix, padding)), cut(
            torch.nn.functional.pad(inside, padding)
        )

    def spread(self, grid: Tensor, shape: tuple[int, int]) -> Tensor:
        """What each value of a matrix [R, C] takes from a grid [down, across] of its blocks;
        broadcasts to [R, C]."""
        if 0 in shape:
            return grid.new_zeros(shape)
        rows, columns = self._sizes(shape)
        if grid.shape[0] > 1:
            grid = grid.repeat_interleave(rows, 0)[: shape[0]]
        if grid.shape[1] > 1:
            grid = grid.repeat_interleave(columns, 1)[:, : shape[1]]
        return grid

    def _sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        return self.rows or shape[0], self.columns or shape[1]


Grain.TENSOR = Grain(None, None)
Grain.ROW = Grain(1, None)
Grain.CHANNEL = Grain(None, 1)
BLOCKS = re.compile(r"group([1-9]\d*)|block([1-9]\d*)x([1-9]\d*)")
NAMED = {"tensor": Grain.TENSOR, "row": Grain.ROW, "channel": Grain.CHANNEL}


def is_grain(name: str) -> bool:
    """Whether a grain is called so."""
    return name in NAMED or BLOCKS.fullmatch(name) is not None


def grain(name: str) -> Grain:
    """The grain of that name: see ALLOWED.

    Raises:
        ValueError: there is none.
    """
    if name in NAMED:
        return NAMED[name]
    found = BLOCKS.fullmatch(name)
    if found is None:
        raise ValueError(f"no grain is called {name!r}; allowed: {ALLOWED}")
    group, rows, columns = found.groups()
    return Grain(1, int(group)) if group else Grain(int(rows), int(columns))


def as_matrix(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(R, C) of a tensor of any shape: C is its last dimension."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1
