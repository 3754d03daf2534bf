"""Rows on the threads of a CUDA block: -DCOLUMNS and -DLANES of csrc/cuda/rows.cuh."""

from lsq.native.launch import check

THREADS = 256
"""Threads of a block of every kernel on rows."""
WARPS = THREADS // 32
"""Warps of such a block."""
VECTOR = 8
"""Values that a thread reads at a time."""
BLOCKS = 256
"""Blocks of a kernel that sums over rows: each leaves one partial row.

Fixed, so that sums do not depend on the GPU.
"""
MANY_BLOCKS = 4096
"""Most blocks of a kernel on rows that sums nothing over them."""
WIDEST = 16384
"""Columns of the widest row that a block can hold in its registers."""


def lanes(columns: int) -> int:
    """Threads that hold one row: 32 to 256, at 16 values a thread where that is enough. Raises
    ValueError for a width that cannot be held."""
    check(
        columns % VECTOR == 0 and 0 < columns <= WIDEST,
        f"rows of {columns} values cannot run on CUDA: the width must be a multiple of {VECTOR}, up"
        f" to {WIDEST}",
    )
    found = 32
    while found < THREADS and found * 2 * VECTOR < columns:
        found *= 2
    return found


def row_defines(columns: int) -> dict[str, int]:
    return {"COLUMNS": columns, "LANES": lanes(columns)}


def sums_in_shared_memory(columns: int, sums: int) -> int:
    """Bytes of shared memory that `sums` SharedColumnSums (csrc/cuda/rows.cuh) take."""
    values = -(-columns // (VECTOR * lanes(columns))) * VECTOR
    return 4 * sums * values * THREADS


def strided(turns: int, most: int) -> int:
    """Blocks of a kernel whose blocks stride over `turns`: 1 to `most`."""
    return max(1, min(most, turns))


def rows_at_a_time(columns: int) -> int:
    """Rows that a block holds at a time."""
    return THREADS // lanes(columns)


def row_blocks(rows: int, columns: int, most: int | None = None) -> int:
    """Blocks for `rows` rows, at most `most`, or BLOCKS; at least 1."""
    return strided(-(-rows // rows_at_a_time(columns)), BLOCKS if most is None else most)


def warp_blocks(rows: int) -> int:
    """Blocks for `rows` rows of which each warp takes one at a time, at most MANY_BLOCKS."""
    return strided(-(-rows // WARPS), MANY_BLOCKS)


TILE = 128
"""Rows and columns of the codes that a block transposes (csrc/cuda/transpose.cuh)."""
PATCH = (32, 256)
"""Rows and columns of a block of kernels that look at each value by itself
(csrc/cuda/patch.cuh)."""


def padded(rows: int) -> int:
    """Rows of the inner dimension of an int8 product: a multiple of 16, at least 16."""
    return max(16, -(-rows // 16) * 16)


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Grid of a kernel that transposes codes [rows, columns]; at least one block."""
    return max(1, -(-rows // TILE)), max(1, -(-columns // TILE))


def patches(rows: int, columns: int) -> tuple[int, int]:
    """Grid of a kernel that looks at each value of a matrix by itself; at least one block."""
    return max(1, -(-rows // PATCH[0])), max(1, -(-columns // PATCH[1]))
