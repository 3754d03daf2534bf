"""Products of decoding on the CPU, of few rows: weights of 8 bits and of 4, both packed, both with
their ends.

Each size has as many weights as fit no cache, which are multiplied one after the other, as the
layers of a model are. Figures are seconds of processor time for one product, so that other work on
the machine counts less. "ratio" is that of 8 bits over the side's.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import common
import torch

from lsq.native import loader, tiles
from lsq.ops.packed_project import PackedProject, PackedWeight
from lsq.program.values import Coded
from lsq.quant import Format, Grain
from lsq.quant.formats import Int4

SIZES = ((512, 512), (2048, 512), (512, 2048), (4096, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 128)
BASELINE = "int8"
MEGABYTES = 64
"""Of the codes of all weights of a size."""
DIFFERENT = 4
"""Weights that are rounded; the others are copies."""


def copies(packed: list[PackedWeight], count: int) -> list[PackedWeight]:
    """So many weights, each with memory of its own."""
    found = []
    for index in range(count):
        one = packed[index % len(packed)]
        memory = torch.empty(len(one.tiles) + 64, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 64 :][: len(one.tiles)].copy_(one.tiles)
        found.append(replace(one, tiles=memory))
    return found


def weights(
    columns: int, inner: int, megabytes: int, instructions: str
) -> dict[str, list[PackedWeight]]:
    """The same codes in 8 bits and in 4."""
    form, narrow, wide = Int4(name="int4", bits=8, grain=Grain.ROW), [], []
    for _ in range(DIFFERENT):
        values = torch.randn(columns, inner)
        stored, scale = form.encode(values, values.abs().amax(1))
        narrow.append(PackedWeight.of_int4(stored, scale, inner, instructions))
        wide.append(PackedWeight.of(form.unpack(stored, inner).contiguous(), scale, instructions))
    count = max(DIFFERENT, megabytes * 2**20 // (columns * inner))
    return {BASELINE: copies(wide, count), "int4": copies(narrow, count)}


def product(rows: int, packed: list[PackedWeight]) -> Callable[[], None]:
    """What multiplies the same rows by each weight."""
    form = Format(name="activation", bits=8, grain=Grain.TENSOR)
    codes = torch.randint(-127, 128, (rows, packed[0].inner), dtype=torch.int8)
    x = Coded(
        format=form, codes=codes, scale=torch.ones(1), clipped=None, error=None, clip=torch.ones(1)
    )
    out = torch.empty(rows, packed[0].columns)
    return loader.sequence(
        [PackedProject(x=x, weight=one, bias=None, out=out, rounded=None) for one in packed]
    )


def seconds(run: Callable[[], None]) -> float:
    """Of processor time."""
    began = time.process_time()
    run()
    return time.process_time() - began


def rows_of(
    size: tuple[int, int], counts: tuple[int, ...], instructions: str, options
) -> Iterator[dict]:
    """Rows of the table for one size of a weight."""
    sides = weights(*size, 1 if options.quick else MEGABYTES, instructions)
    for rows in counts:
        runs = {name: product(rows, packed) for name, packed in sides.items()}
        measured: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds + 1):
            for name, run in runs.items():
                measured[name].append(seconds(run) / len(sides[name]))
        timings = {name: common.timing(values[1:]) for name, values in measured.items()}
        for name, timing in timings.items():
            yield {
                "outputs": size[0],
                "inputs": size[1],
                "rows": rows,
                "side": name,
                "microseconds": 1e6 * timing.median,
                "fastest": 1e6 * timing.fastest,
                "gigabytes_per_second": 1e-9 * len(sides[name][0].tiles) / timing.median,
                "ratio": timings[BASELINE].median / timing.median,
            }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--instructions", choices=tiles.usable(), default=tiles.usable()[0], help="what multiplies"
    )
    options = common.parse(parser, arguments)
    sizes, counts = (((64, 96),), (1, 9)) if options.quick else (SIZES, ROWS)
    table = [row for size in sizes for row in rows_of(size, counts, options.instructions, options)]
    conditions = common.conditions(
        options, baseline=BASELINE, multiplies=options.instructions, megabytes=MEGABYTES
    )
    common.report("decode_product", table, conditions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
