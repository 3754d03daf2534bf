"""Products of int8 codes with scales of groups along K, beside one scale for each row, and beside
floats.

Results are floats everywhere. "int8" multiplies by lsq's tiles and ends with the scales of rows;
"int8/group32" and so on scale each group's sums (GroupedProduct) with the same instructions. Both
pack the weight in every call, as a step of training does; "packed" has done so before, as decoding
does. "bfloat16" and "float32" are torch.mm. Ratios are to "int8".
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import common
import torch

from lsq.gemm import cpu
from lsq.gemm.configuration import CpuConfiguration
from lsq.native import loader, tiles
from lsq.ops.grouped_product import GroupedCodes, GroupedProduct, packed_bytes
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.ops.project import Project
from lsq.program.values import Coded, Rows, Weight
from lsq.quant import Format, Grain, WeightFormat
from lsq.run.backends import backend

GROUPS = (32, 64, 128)
SHAPES = (
    (1, 512, 512),
    (1, 2048, 2048),
    (8, 2048, 512),
    (32, 2048, 512),
    (256, 512, 512),
    (1800, 512, 512),
    (1800, 2048, 512),
    (1800, 512, 2048),
)
QUICK = ((1, 32, 64), (7, 33, 40))


def codes(rows: int, inner: int) -> torch.Tensor:
    """Random int8 [R, K]."""
    return torch.randint(-127, 128, (rows, inner), dtype=torch.int8)


def of_rows(
    rows: int, columns: int, inner: int, instructions: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products with a scale for each row of the weight."""
    weight, scale, out = codes(columns, inner), torch.rand(columns), torch.empty(rows, columns)
    form = Format(name="activation", bits=8, grain=Grain.TENSOR)
    x, place = Coded(format=form, codes=codes(rows, inner), scale=torch.rand(1)), backend("cpu")
    stored = Weight(
        format=WeightFormat(name="int8", bits=8, grain=Grain.ROW), codes=weight, scale=scale
    )
    plain = Project(x=Rows(coded=x), weight=stored, out=out)
    scratch = [place.allocate(*spec) for spec in plain.cpu_scratch()]
    way = CpuConfiguration(kernel=instructions)

    def multiply() -> None:
        with mock.patch.object(cpu, "configuration_of", lambda *product: way):
            plain.cpu(*scratch)

    yield "int8", multiply
    packed = PackedProject(x=x, weight=PackedWeight.of(weight, scale, instructions), out=out)
    yield "int8, packed", packed.cpu


def of_groups(
    rows: int, columns: int, inner: int, instructions: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products with scales of groups."""
    for group in GROUPS:
        groups = -(-inner // group)
        product = GroupedProduct(
            a=GroupedCodes(codes=codes(rows, inner), scale=torch.rand(rows, groups), group=group),
            b=GroupedCodes(
                codes=codes(columns, inner), scale=torch.rand(columns, groups), group=group
            ),
            out=torch.empty(rows, columns),
        )
        packed, copies = (torch.empty(shape, dtype=dtype) for shape, dtype in product.cpu_scratch())
        packed = packed[-packed.data_ptr() % 64 :][: packed_bytes(product)]

        def both(product=product, packed=packed, copies=copies) -> None:
            loader.call("lsq_pack_grouped", product, packed)
            product.multiply(packed, copies, instructions)

        yield f"int8/group{group}", both
        yield (
            f"int8/group{group}, packed",
            lambda product=product, packed=packed, copies=copies: product.multiply(
                packed, copies, instructions
            ),
        )


def of_floats(rows: int, columns: int, inner: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """PyTorch's."""
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        yield str(dtype).removeprefix("torch."), lambda a=a, b=b, out=out: torch.mm(a, b, out=out)


def rows_of(shape: tuple[int, int, int], instructions: str, rounds: int) -> Iterator[dict]:
    """Rows of the table for one product."""
    sides = dict(
        [*of_rows(*shape, instructions), *of_groups(*shape, instructions), *of_floats(*shape)]
    )
    with torch.no_grad():
        timings = common.alternate(sides, rounds=rounds)
    for side, timing in timings.items():
        baseline = "int8, packed" if side.endswith("packed") else "int8"
        yield {
            "instructions": instructions,
            "product": " x ".join(map(str, shape)),
            "side": side,
            "milliseconds": 1e3 * timing.median,
            "fastest": 1e3 * timing.fastest,
            "giga_operations_per_second": 2e-9 * math.prod(shape) / timing.median,
            "ratio": timings[baseline].median / timing.median,
        }


def means(table: list[dict]) -> Iterator[dict]:
    """Geometric means of each side's ratios over all products."""
    for instructions, side in dict.fromkeys((row["instructions"], row["side"]) for row in table):
        ratios = [
            row["ratio"]
            for row in table
            if (row["instructions"], row["side"]) == (instructions, side)
        ]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield {
            "instructions": instructions,
            "side": side,
            "ratio": mean,
            "smallest": min(ratios),
            "largest": max(ratios),
        }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = common.parser(__doc__)
    options, table = common.parse(parser, arguments), []
    if not tiles.vectorised():
        parser.error(
            "this processor has no instructions for tiles of int8: avx_vnni, avx512_vnni or amx"
        )
    for instructions in tiles.usable():
        if instructions != tiles.PLAIN:
            for shape in QUICK if options.quick else SHAPES:
                table += rows_of(shape, instructions, options.rounds)
    conditions = common.conditions(options, baseline="int8, or int8, packed")
    print(common.table(list(means(table))), end="\n\n")
    common.report("grouped", table, conditions, options, means=list(means(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
