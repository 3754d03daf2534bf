"""Products of a training step with their epilogues on the CPU, beside products of floats.

Every operation of a step that multiplies codes runs as in a training: "lsq". "bfloat16" and
"float32" are torch.mm of the same shape without an epilogue, which is less work. "mean" rows are
geometric means.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import common
import torch
from operations import QUICK, Call, Size, calls, products_of

from lsq.native import loader
from lsq.program.samples import Sampler
from lsq.run.backends import backend

SIZE = Size(name="base", hidden=512, feed_forward=2048, heads=8, sentences=64)
OPERATIONS = ("Project", "ProjectInputGradient", "ProjectWeightGradient")
OPERATIONS += ("VocabularyLoss", "VocabularyLossGradient")
BASELINE = "bfloat16"


def sides_of(call: Call, m: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """The operation on random tensors, and products of floats."""
    operation, place = Sampler().operation(call.operation), backend("cpu")
    for leaf in operation.leaves():
        if leaf.name == "x.clipped" and leaf.of(operation) is not None:
            bits = leaf.of(operation)  # about one in a hundred is clipped in a training
            bits.copy_(torch.rand(bits.shape) < 8 / 100)
    scratch = [place.allocate(*each) for each in place.scratch(operation)]
    found = {"lsq": place.prepare([(operation, scratch)])}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
    return found


def rows(call: Call, m: int, n: int, k: int, rounds: int) -> Iterator[dict]:
    with torch.no_grad():
        timings = common.alternate(sides_of(call, m, n, k), rounds=rounds)
    for side, timing in timings.items():
        yield {
            "operation": call.name,
            "product": f"{m} x {n} x {k}",
            "result": call.result,
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "giga_operations_per_second": 2e-9 * m * n * k / timing.median,
            "ratio": timings[BASELINE].median / timing.median,
        }


def means(table: list[dict]) -> Iterator[dict]:
    """Figures of each side over all products."""
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
    parser = common.parser(__doc__)
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability, in every place of a layer"
    )
    options = common.parse(parser, arguments)
    size, table = QUICK if options.quick else SIZE, []
    for call in calls(OPERATIONS, size, options.dropout):
        products = products_of(call.operation)
        if call.backward == "int8" and products:
            table += rows(call, *products[0][1:], options.rounds)
    conditions = common.conditions(
        options,
        baseline=BASELINE,
        shape=asdict(size),
        dropout=options.dropout,
        library=loader.description(),
    )
    print(common.table(list(means(table))), end="\n\n")
    common.report("product", table, conditions, options, means=list(means(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
