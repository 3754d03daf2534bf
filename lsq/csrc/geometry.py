"""How rows are spread over the threads of a CUDA block: what csrc/kernels/rows.cuh takes as -DCOLUMNS and -DLANES."""

from lsq.csrc.launch import check

THREADS = 256
"""Of a block of every kernel that works on rows."""
VECTOR = 8
"""Values that a thread reads at a time."""
BLOCKS = 256
"""Blocks of a kernel that sums over rows: each leaves one partial row. Fixed, so that sums do not depend on the GPU."""
MANY_BLOCKS = 4096
"""Most blocks of a kernel on rows that sums nothing over them."""
WIDEST = 16384
"""Columns of the widest row that a block can hold in its registers."""


def lanes(columns: int) -> int:
    """Threads that hold one row: 32 to 256, at 16 values a thread where that is enough.

    Raises:
        ValueError: rows of that width cannot be held.
    """
    check(
        columns % VECTOR == 0 and 0 < columns <= WIDEST,
        f"rows of {columns} values cannot run on CUDA: the width must be a multiple of {VECTOR}, up to {WIDEST}",
    )
    found = 32
    while found < THREADS and found * 2 * VECTOR < columns:
        found *= 2
    return found


def row_defines(columns: int) -> dict[str, int]:
    """-D for a kernel on rows of `columns` values."""
    return {"COLUMNS": columns, "LANES": lanes(columns)}


def row_blocks(rows: int, columns: int, most: int = BLOCKS) -> int:
    """Blocks for `rows` rows, at most `most`; at least 1."""
    at_a_time = THREADS // lanes(columns)
    return max(1, min(most, -(-rows // at_a_time)))
