"""Products of a training step with their ends: lsq's tiles, oneDNN with loops over its sums, and
products of floats.

Every operation of a step that multiplies codes is run as it is in a training: "onednn" makes blocks
of sums that all threads then read, and the kernels of tiles (lsq/csrc/cpu/tiles.h) end what they
have multiplied. "bfloat16" and "float32" are torch.mm of the same shape without any end, which is
less work. Ratios are to oneDNN; "mean" rows are geometric means.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import common
import torch
from operations import QUICK, Call, Size, calls

from lsq import gemm
from lsq.gemm import lookup
from lsq.gemm.configuration import ONEDNN, CpuConfiguration
from lsq.gemm.cpu_product import scratch_bytes
from lsq.gemm.product_key import ProductKey
from lsq.native import tiles
from lsq.program.operation import Operation
from lsq.program.samples import Sampler
from lsq.run.backends import backend

SIZE = Size(name="base", hidden=512, feed_forward=2048, heads=8, sentences=64)
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


def configurations(key: ProductKey) -> dict[str, CpuConfiguration]:
    """Each kernel as it runs untuned."""
    found = {ONEDNN: CpuConfiguration(rows=key.request.rows)}
    return found | {name: CpuConfiguration(kernel=name) for name in tiles.preferred()}


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
    operation, place, use = drawn(call), backend("cpu"), lookup.table().use(key)
    ways = configurations(key)
    largest = max(scratch_bytes(key, way) for way in ways.values())
    wanted = [
        ((max(largest, *shape),), dtype) if dtype == torch.uint8 else (shape, dtype)
        for shape, dtype in place.scratch(operation)
    ]
    run = place.prepare([(operation, [place.allocate(*each) for each in wanted])])

    def side(way: CpuConfiguration) -> Callable[[], object]:
        def multiply() -> None:
            use.configuration = way
            run()

        return multiply

    found = {name: side(way) for name, way in ways.items()}
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
