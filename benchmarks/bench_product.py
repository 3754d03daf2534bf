"""Products of a training step with their epilogues by lsq's tiles, beside bare products of oneDNN
and of floats.

Every operation of a step that multiplies codes runs as in a training, by each kernel of tiles
(lsq/csrc/cpu/tiles.h). "onednn" is torch._int_mm, "bfloat16" and "float32" are torch.mm of the same
shape without any epilogue, which is less work. Ratios are to oneDNN; "mean" rows are geometric
means.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from unittest import mock

import common
import torch
from operations import QUICK, Call, Size, calls

from lsq import gemm
from lsq.gemm import cpu
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.product_key import ProductKey
from lsq.native import tiles
from lsq.program.operation import Operation
from lsq.program.samples import Sampler
from lsq.run.backends import backend

SIZE = Size(name="base", hidden=512, feed_forward=2048, heads=8, sentences=64)
ONEDNN = "onednn"
OPERATIONS = (
    "Project",
    "ProjectInputGradient",
    "ProjectWeightGradient",
    "VocabularyLoss",
    "VocabularyLossGradient",
)


def product_of(operation) -> ProductKey | None:
    """What an operation multiplies; None: floats."""
    with gemm.requested() as found:
        operation.cpu_scratch()
    return found[0] if found else None


def drawn(call: Call) -> Operation:
    """The operation on random tensors, of which one activation in a hundred is clipped, about as in
    a training."""
    operation = Sampler().operation(call.operation)
    for leaf in operation.leaves():
        if leaf.name == "x.clipped" and leaf.of(operation) is not None:
            bits = leaf.of(operation)
            bits.copy_(torch.rand(bits.shape) < 8 / 100)
    return operation


def sides_of(call: Call, key: ProductKey) -> dict[str, Callable[[], object]]:
    """The operation with each kernel, and products of floats."""
    operation, place = drawn(call), backend("cpu")
    scratch = [place.allocate(*spec) for spec in place.scratch(operation)]
    run = place.prepare([(operation, scratch)])

    def side(kernel: str) -> Callable[[], object]:
        way = CpuConfiguration(kernel=kernel)

        def multiply() -> None:
            with mock.patch.object(cpu, "configuration_of", lambda *product: way):
                run()

        return multiply

    a, b = (torch.randint(-127, 128, (size, key.k), dtype=torch.int8) for size in (key.m, key.n))
    sums = torch.empty(key.m, key.n, dtype=torch.int32)
    found = {ONEDNN: lambda: gemm.int8_product(a, b, out=sums)}
    found |= {name: side(name) for name in tiles.preferred()}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(key.m, key.k, dtype=dtype), torch.randn(key.k, key.n, dtype=dtype)
        out = torch.empty(key.m, key.n, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
    return found


def rows(call: Call, key: ProductKey, rounds: int) -> Iterator[dict]:
    """Rows of the table for one product."""
    with torch.no_grad():
        timings = common.alternate(sides_of(call, key), rounds=rounds)
    for side, timing in timings.items():
        yield {
            "operation": call.name,
            "product": f"{key.m} x {key.n} x {key.k}",
            "result": call.result,
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "giga_operations_per_second": 1e-9 * key.arithmetic / timing.median,
            "ratio": timings[ONEDNN].median / timing.median,
        }


def means(table: list[dict]) -> Iterator[dict]:
    """The figures of each side over all products."""
    for side in dict.fromkeys(row["side"] for row in table):
        ratios = [row["ratio"] for row in table if row["side"] == side]
        yield {
            "side": side,
            "products": len(ratios),
            "ratio": math.exp(statistics.fmean(map(math.log, ratios))),
            "smallest": min(ratios),
            "largest": max(ratios),
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability, in every place of a layer"
    )
    options = common.parse(parser, arguments)
    size, table = QUICK if options.quick else SIZE, []
    for call in calls(OPERATIONS, size, options.dropout):
        key = product_of(call.operation)
        if call.backward == "int8" and key is not None:
            table += rows(call, key, options.rounds)
    conditions = common.conditions(
        options, baseline=ONEDNN, shape=asdict(size), dropout=options.dropout
    )
    print(common.table(list(means(table))), end="\n\n")
    common.report("product", table, conditions, options, means=list(means(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
