"""Products with weights of 1 to 8 bits in packed fields, beside int8, bfloat16 and PyTorch's int4.

Weights have a scale for each output, or for each group of inputs of an output ("int4/group64").
Those from "caches" are one weight, multiplied again and again; those from "memory" are copies that
take turns, so that none is in a cache when its turn comes. One thread is timed by the seconds that
the processor gave it, which hardly depend on what else runs; several by the wall's clock. "ratio"
is the time of the row's baseline, int8 with scales of the same kind, over the side's. Ways to
multiply are compared with the one that a rule chooses.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import common
import torch
from torch import Tensor
from torch.nn.functional import linear

from lsq.gemm.registers import BY_RULE, MOST
from lsq.native import loader, tiles
from lsq.ops.grouped_product import GroupedCodes
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.ops.project import Project
from lsq.program.values import Coded, Rows, Weight
from lsq.quant.formats import WEIGHT_FORMATS, Format, Grain
from lsq.quant.numbers import scaled_format
from lsq.quant.stored import Decode, StoredType, stored_type
from lsq.run.backends import backend

SIZES = {"caches": 2048, "memory": 4096}
"""Where weights lie -> their outputs, and as many inputs."""
QUICK_SIZES = {"caches": 128, "memory": 128}
ROWS, QUICK_ROWS = (1, 4, 8, 16, 64, 256), (1, 4)
INT8 = Format(name="activation", bits=8, grain=Grain.TENSOR)
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

Product = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A weight in a form that products read."""

    tensors: tuple[Tensor, ...]
    products_of: Callable[[int], Callable[..., Product]]
    """Number of random rows -> (these tensors or a copy of them) -> a product with these rows."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def products(self, copies: int, rows: int) -> Product:
        """Products with copies of the weight, in turn."""
        copied = (each.expand(copies, *each.shape).contiguous() for each in self.tensors)
        product = self.products_of(rows)
        turns = itertools.cycle([product(*tensors) for tensors in zip(*copied, strict=True)])
        return lambda: next(turns)()


def of_packed(weight: PackedWeight) -> Operand:
    def products_of(rows: int) -> Callable[..., Product]:
        codes = torch.randint(-127, 128, (rows, weight.inner), dtype=torch.int8)
        out = torch.empty(rows, weight.columns)
        if weight.group == 0:
            x = Coded(format=INT8, codes=codes, scale=torch.ones(1))

            def product(memory: Tensor, scale: Tensor) -> Product:
                one = replace(weight, tiles=memory, scale=scale)
                return backend("cpu").prepare([(PackedProject(x=x, weight=one, out=out), [])])

            return product
        operation = Project(
            x=Rows(floats=torch.empty(codes.shape)),
            weight=Weight(format=None, values=torch.empty(weight.columns, weight.inner)),
            groups=GroupedCodes(codes=codes, scale=torch.rand(rows, 1), group=weight.group),
            out=out,
        )
        return lambda memory: functools.partial(
            loader.call, "lsq_multiply_groups", operation, replace(weight, tiles=memory)
        )

    tensors = (weight.tiles,) if weight.scale is None else (weight.tiles, weight.scale)
    return Operand(tensors=tensors, products_of=products_of)


def int8(size: int, instructions: str) -> Operand:
    codes = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return of_packed(PackedWeight.of(codes, torch.rand(size), instructions))


def int4(size: int, instructions: str) -> Operand:
    columns = WEIGHT_FORMATS["int4"](8, Grain.ROW).stored_columns(size)
    stored = torch.randint(1, 8, (size, columns), dtype=torch.int8)
    return of_packed(PackedWeight.of_int4(stored, torch.rand(size), size, instructions))


def fields(bits: int, registers: int = BY_RULE) -> Callable[[int, str], Operand]:
    """Codes of so many bits; `registers`: rows up to which no tile is unpacked."""
    stored = StoredType(bits=bits, decode=Decode.AFFINE, zero=2 ** (bits - 1))

    def make(size: int, instructions: str) -> Operand:
        codes = torch.randint(0, 2**bits, (size, size), dtype=torch.uint8)
        weight = PackedWeight.of_stored(codes, torch.rand(size), stored, instructions=instructions)
        return of_packed(replace(weight, registers=registers))

    return make


def groups(name: str) -> Callable[[int, str], Operand]:
    form = scaled_format(name)
    stored, group = stored_type(form.number), form.grain.columns

    def make(size: int, instructions: str) -> Operand:
        codes = torch.randint(0, len(form.number.values), (size, size), dtype=torch.uint8)
        scale = torch.rand(size, size // group)
        return of_packed(
            PackedWeight.of_stored(codes, scale, stored, group=group, instructions=instructions)
        )

    return make


def bfloat16(size: int, instructions: str) -> Operand:
    def products_of(rows: int) -> Callable[..., Product]:
        x = torch.randn(rows, size, dtype=torch.bfloat16)
        return lambda weight: functools.partial(linear, x, weight)

    weight = torch.randn(size, size, dtype=torch.bfloat16)
    return Operand(tensors=(weight,), products_of=products_of)


def torch_int4(group: int) -> Callable[[int, str], Operand]:
    """PyTorch's product of bfloat16 rows with packed weights of 4 bits."""

    def make(size: int, instructions: str) -> Operand:
        def products_of(rows: int) -> Callable[..., Product]:
            x, multiply = torch.randn(rows, size).bfloat16(), torch._weight_int4pack_mm_for_cpu
            return lambda weight, scales: functools.partial(multiply, x, weight, group, scales)

        codes = torch.randint(0, 16, (size, size), dtype=torch.int32)
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.rand(size // group, size, 2, dtype=torch.bfloat16)
        return Operand(tensors=(packed, scales), products_of=products_of)

    return make


WAYS = {"": BY_RULE, " in registers": MOST, " in tiles": 0}
"""How few rows are multiplied -> rows up to which registers do it; more are the same."""
GROUPED = ("int8/group64", "int2/group64", "int3/group64", "int4/group64", "int4/group32")
GROUPED += ("mxfp4", "nf4/group64")
TABLES: tuple[dict[str, Callable[[int, str], Operand]], ...] = (
    {
        "int8": int8,
        "int4": int4,
        **{f"{bits} bits": fields(bits) for bits in (1, 2, 3, 4, 6)},
        "torch bfloat16": bfloat16,
        **{f"torch int4/group{group}": torch_int4(group) for group in (32, 64)},
    },
    {name: groups(name) for name in GROUPED},
    *(
        {f"{bits} bits{way}": fields(bits, registers) for way, registers in WAYS.items()}
        for bits in (1, 2, 3, 4)
    ),
)
"""Sides that are compared with each other; the first one is the baseline."""


def measured(sides: dict, place: str, size: int, options) -> Iterator[dict]:
    """The rows of sides whose weights [size, size] lie at a place."""
    operands = {name: make(size, options.instructions) for name, make in sides.items()}
    baseline, wanted = next(iter(sides)), 1e6 * options.megabytes if place == "memory" else 0
    copies = {name: 1 + int(wanted / operand.bytes) for name, operand in operands.items()}
    for rows in options.rows:
        timings = common.alternate(
            {name: one.products(copies[name], rows) for name, one in operands.items()},
            rounds=options.rounds,
            clock=common.clock_of(options),
        )
        for name, timing in timings.items():
            yield {
                "weights": place,
                "size": size,
                "rows": rows,
                "side": name,
                "bytes": operands[name].bytes,
                "copies": copies[name],
                "microseconds": 1e6 * timing.median,
                "fastest": 1e6 * timing.fastest,
                "baseline": baseline,
                "ratio": timings[baseline].median / timing.median,
                "ratio_of_fastest": timings[baseline].fastest / timing.fastest,
            }
        print(f"{place}, {rows} rows, beside {baseline}: done", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--rows", type=common.positive, nargs="+", default=ROWS, metavar="M", help="of products"
    )
    parser.add_argument(
        "--instructions",
        choices=tiles.usable(),
        default=tiles.fastest(),
        help="by which lsq multiplies; PyTorch follows ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY",
    )
    parser.add_argument(
        "--megabytes",
        type=common.positive,
        default=600,
        metavar="N",
        help="of copies of each weight from memory; more than the last cache holds",
    )
    options = common.parse(parser, arguments)
    if options.quick:
        options.rows, options.megabytes = QUICK_ROWS, 1
    table = [
        row
        for place, size in (QUICK_SIZES if options.quick else SIZES).items()
        for sides in TABLES
        for row in measured(sides, place, size, options)
    ]
    conditions = common.conditions(
        options,
        baseline="int8; int8/group64 for scales of groups; the rule for ways to multiply",
        lsq_instructions=options.instructions,
        clock=common.clock_of(options).__name__,
        megabytes_of_copies=options.megabytes,
        last_cache=CACHE.read_text().strip() if CACHE.is_file() else None,
        library=loader.description(),
    )
    common.report("stored", table, conditions, options)


if __name__ == "__main__":
    main()
