"""Launches of lsq.ops.bit_product."""

from lsq.native.launch import check, launch
from lsq.ops.bit_product import WORD, BitProduct, ByteProduct, RoundBits, UnpackBits
from lsq.ops.launches import int8_products
from lsq.program.cuda import launches

MOST_BLOCKS = 65535  # Of a grid, in its second dimension.
PATCH = 32  # Rows and columns of sums of a block; LINES lines of one word, one a warp.
LINES = 8


@launches.register(RoundBits)
def launch_round_bits(op: RoundBits):
    return launch("bit_product.cu", "lsq_round_bits", op, grid=_grid(op.out.lines, op.out.words))


@launches.register(UnpackBits)
def launch_unpack_bits(op: UnpackBits):
    words = -(-op.depth // WORD)
    return launch("bit_product.cu", "lsq_unpack_bits", op, grid=_grid(op.lines, words))


@launches.register(BitProduct)
def launch_bit_product(op: BitProduct):
    rows, columns = op.rows, op.columns
    if op.out is not None:  # padding is written, too
        rows, columns = op.out.lines, op.out.words * WORD
        rows, columns = (columns, rows) if op.out.by_column else (rows, columns)
    grid = -(-rows // PATCH), -(-columns // PATCH)
    _check_blocks(grid[1], "columns", columns)
    return launch(
        "bit_product.cu",
        "lsq_bit_product",
        op,
        grid=grid,
        A_BITS=op.a.bits,
        B_BITS=op.b.bits,
        A_SIGNED=int(op.a.is_signed),
        B_SIGNED=int(op.b.is_signed),
    )


@launches.register(ByteProduct)
def launch_byte_product(op: ByteProduct):
    return int8_products(op.x, op.codes, op.sums)


def _grid(lines: int, words: int) -> tuple[int, int]:
    _check_blocks(words, "codes of a line", words * WORD)
    return max(1, -(-lines // LINES)), max(1, words)


def _check_blocks(blocks: int, name: str, count: int) -> None:
    check(
        blocks <= MOST_BLOCKS,
        f"{count:,} {name} are more than {MOST_BLOCKS * WORD:,}: multiply parts of the matrix",
    )
