"""Rows on the threads of a CUDA block: -DCOLUMNS and -DLANES of csrc/cuda/rows.cuh."""

import torch

from lsq.native.launch import check

THREADS = 256
"""Threads of a block in every kernel on rows."""
WARPS = THREADS // 32
"""Warps of such a block."""
VECTOR = 8
"""Values that a thread reads at a time."""
BLOCKS_OF_MULTIPROCESSOR = 2
"""Blocks for each multiprocessor, and so partial rows, of a kernel that sums over rows."""
MULTIPROCESSORS = 128
"""Number of multiprocessors to assume without a GPU, as in the emulator."""
MANY_BLOCKS = 4096
"""Most blocks of a kernel on rows that does not sum over rows."""
WIDEST = 16384
"""Columns of the widest row that a block can hold in its registers."""


def lanes(columns: int) -> int:
    """Return the threads that hold one row: 32 to 256, with 16 values per thread if that is enough.
    Raises ValueError: rows of this width cannot be held."""
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
    """Return the bytes of shared memory that `sums` SharedColumnSums (csrc/cuda/rows.cuh) take."""
    values = -(-columns // (VECTOR * lanes(columns))) * VECTOR
    return 4 * sums * values * THREADS


def strided(turns: int, most: int) -> int:
    """Return the number of blocks, 1 to `most`, of a kernel whose blocks stride over `turns`."""
    return max(1, min(most, turns))


def rows_at_a_time(columns: int) -> int:
    """Return the rows that a block holds at a time."""
    return THREADS // lanes(columns)


def row_blocks(rows: int, columns: int, most: int | None = None) -> int:
    """Return the number of blocks for `rows` rows: at least 1, at most `most` (default:
    `summing_blocks`)."""
    return strided(-(-rows // rows_at_a_time(columns)), most or summing_blocks())


def summing_blocks() -> int:
    """Return the most blocks of a kernel that sums over rows: as many as the current GPU runs at a
    time, so that none waits for another. Sums are the same on all GPUs with as many
    multiprocessors."""
    return BLOCKS_OF_MULTIPROCESSOR * multiprocessors()


def multiprocessors() -> int:
    """Return the number of multiprocessors of the current GPU."""
    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def warp_blocks(rows: int) -> int:
    """Return the number of blocks for `rows` rows, one per warp at a time: at most MANY_BLOCKS."""
    return strided(-(-rows // WARPS), MANY_BLOCKS)


TILE = 128
"""Rows and columns of the codes that a block transposes (csrc/cuda/transpose.cuh)."""
PATCH = (32, 256)
"""Rows and columns of a block in element-wise kernels (csrc/cuda/patch.cuh)."""


def padded(rows: int) -> int:
    """Return the padded inner dimension of an int8 product: a multiple of 16, at least 16."""
    return max(16, -(-rows // 16) * 16)


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the grid of a kernel that transposes codes [rows, columns]; at least one block."""
    return max(1, -(-rows // TILE)), max(1, -(-columns // TILE))


def patches(rows: int, columns: int) -> tuple[int, int]:
    """Return the grid of an element-wise kernel on a matrix; at least one block."""
    return max(1, -(-rows // PATCH[0])), max(1, -(-columns // PATCH[1]))
