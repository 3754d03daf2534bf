"""Products of few rows with 2:4 sparse weights, as decoding makes them: packed dense, and packed
sparse.

Each side goes through as many weights as lie in no cache of a core, as a step of decoding does.
Both have the same codes, make the same integers and end alike. The ratio is that of the dense
side's median to the other's.
"""

import sys
import time
from dataclasses import dataclass

import common
import torch

from lsq.models.sparsity import choose
from lsq.native import tiles
from lsq.ops.packed_project import PackedProject, PackedWeight
from lsq.program.values import Coded
from lsq.quant import GRADIENT
from lsq.run.backends import backend

DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one product."""

    outputs: int
    inputs: int


SIZES = (
    Size(outputs=512, inputs=2048),
    Size(outputs=2048, inputs=512),
    Size(outputs=4096, inputs=1024),
)
ROWS = (1, 4, 8, 16, 32, 256)
QUICK_SIZES, QUICK_ROWS = (Size(outputs=64, inputs=128),), (1, 9)


def weights(size: Size, megabytes: int, instructions: str) -> dict[str, list[PackedWeight]]:
    """The same sparse codes packed in both ways, `megabytes` of them."""
    found: dict[str, list[PackedWeight]] = {DENSE: [], SPARSE: []}
    for _ in range(max(1, megabytes * 2**20 // (size.outputs * size.inputs))):
        codes = torch.randint(-127, 128, (size.outputs, size.inputs), dtype=torch.int8)
        codes *= choose(torch.rand(size.outputs, size.inputs))
        scale = torch.rand(size.outputs)
        found[DENSE].append(PackedWeight.of(codes, scale, instructions))
        found[SPARSE].append(PackedWeight.of_sparse(codes, scale, instructions))
    return found


def side(packed: list[PackedWeight], rows: int):
    """Runs a product with each weight."""
    codes = torch.randint(-127, 128, (rows, packed[0].inner), dtype=torch.int8)
    x = Coded(format=GRADIENT, codes=codes, scale=torch.ones(1))
    return backend("cpu").prepare(
        [
            (PackedProject(x=x, weight=weight, out=torch.empty(rows, weight.columns)), [])
            for weight in packed
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--megabytes", type=common.positive, default=64, metavar="N", help="of int8 weights a size"
    )
    parser.add_argument(
        "--instructions",
        choices=tiles.INSTRUCTIONS,
        default=tiles.usable()[0],
        help="what multiplies",
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="of one thread, where others are at work"
    )
    options = common.parse(parser, arguments)
    if options.instructions not in tiles.usable():
        parser.error(
            f"--instructions {options.instructions} cannot run here; there are"
            f" {', '.join(tiles.usable())}"
        )
    clock = time.thread_time if options.processor_time else time.perf_counter
    if options.processor_time and options.threads != 1:
        parser.error("--processor-time is that of one thread: give --threads 1")
    table = []
    for size in QUICK_SIZES if options.quick else SIZES:
        packed = weights(size, 1 if options.quick else options.megabytes, options.instructions)
        count = len(packed[DENSE])
        for rows in QUICK_ROWS if options.quick else ROWS:
            sides = {name: side(found, rows) for name, found in packed.items()}
            timings = common.alternate(sides, rounds=options.rounds, clock=clock)
            for name, timing in timings.items():
                table.append(
                    {
                        "product": f"{rows} x {size.outputs} x {size.inputs}",
                        "side": name,
                        "microseconds": 1e6 * timing.median / count,
                        "fastest": 1e6 * timing.fastest / count,
                        "gigabytes_per_second": 1e-9
                        * sum(one.tiles.numel() for one in packed[name])
                        / timing.median,
                        "ratio": timings[DENSE].median / timing.median,
                        "ratio_of_fastest": timings[DENSE].fastest / timing.fastest,
                    }
                )
    conditions = common.conditions(
        options,
        baseline=DENSE,
        instructions_of_products=options.instructions,
        megabytes=options.megabytes,
        clock=clock.__name__,
    )
    common.report("sparse_product", table, conditions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
