"""Models a training step on GPUs, lsq's as its kernels stand and its opponents' at their best:
nothing is measured.

lsq's launches are those of its real lists; what kernels do is counted in the emulator (--count,
minutes), or taken from the file of an earlier count. Registers are NVRTC's. See docs/gpu.md.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import common
import gpu_assumptions
import gpu_lists
import operations
from gpu_assumptions import A100_BF16, ONE_H100, SIZES_4090
from gpu_lists import key_of
from gpu_model import (
    GPUS,
    H100,
    MICRO,
    SECTOR,
    TERA,
    Clock,
    Gpu,
    Moved,
    Multiplied,
    Time,
    Work,
    bytes_of,
    place_of,
    total,
    variant,
)
from gpu_opponents import SIDES, SINGLE, Model, Pass
from matplotlib.figure import Figure
from operations import QUICK, sizes

from lsq.config import QuantConfig
from lsq.emulator.profile import Operand, Profile, Traffic
from lsq.gemm.configuration import FASTER_LIBRARIES, default_tile
from lsq.gemm.operations import TILED, TILED_ALONE
from lsq.gemm.product_key import ProductKey
from lsq.gemm.product_key import key_of as key_of_product
from lsq.native import compiler, geometry
from lsq.native.launch import Kernel, Launch, Product

QUANT = QuantConfig(backward="int8")
LSQ = "lsq"
ENDED = {op: f"lsq_{op.removeprefix('project_')}_product" for op in TILED}
"""Kernels that end products, by their operations."""
ALONE = {f"lsq_{op}_product": op for op in TILED_ALONE}
"""Operations, by the kernels that nothing else ends their products: lists have these."""
BEGIN = "lsq_begin_weight_gradient"
TRANSPOSE = Kernel(source="transpose.cu", name="lsq_transpose_codes")
MAIN_LOOP = {"mma": 1, "integer": 13.67, "branch": 1.70, "memory": 0.375, "barrier": 1 / 64}
"""Instructions that the emulator counts of a main loop for each mma of a tile of 128 x 128; the
others are of ends."""
GROUPS = {
    "products": ("product", *ENDED.values()),
    "attention": ("attention", "lsq_attention"),
    "epilogues and norms": tuple(
        "lsq_end lsq_residual lsq_project lsq_finish norm activation addition".split()
    ),
    "rounding, transposes": tuple(
        "rounding lsq_round lsq_transpose lsq_begin lsq_start lsq_zero lsq_float".split()
    ),
    "loss": ("loss", "lsq_vocabulary", "lsq_sum_losses", "lsq_kept"),
    "embedding": ("embedding", "lsq_embed", "lsq_rank", "lsq_sort", "lsq_sum_occ", "lsq_join"),
    "update": ("Adam", "lsq_adam", "gradients"),
}
"""Parts of a step, by the beginnings of the names of kernels."""
GAPS = "gaps"
LABELS = {"compiled": "bfloat16", "int8": "torchao int8", LSQ: LSQ}
"""Side -> its name in the picture."""
LUCK = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one kernel takes in a step on a side."""

    side: str
    kernel: str
    group: str
    launches: int
    milliseconds: float
    """Without gaps."""
    bound: str
    gigabytes: float


def group_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    found = [
        (len(begin), group)
        for group, begins in GROUPS.items()
        for begin in begins
        if name.startswith(begin)
    ]
    return max(found)[1]


class Step:
    """lsq's step of a model: its lists, and what was counted of their kernels.

    Raises:
        ValueError: a kernel was not counted; count again.
    """

    def __init__(self, size: operations.Size, counts: dict[str, Profile]):
        self.size = size
        self.parts = gpu_lists.step(size, QUANT)
        self.parameters = gpu_lists.parameters(size, QUANT)
        launches = {
            id(entry): entry
            for part in self.parts
            for entry in part.entries
            if isinstance(entry, Launch)
        }
        missing = sorted({key_of(entry) for entry in launches.values()} - set(counts))
        if missing:
            raise ValueError(
                f"{len(missing)} kernels were not counted, such as {missing[0]}; run with --count"
            )
        self.counted = {number: counts[key_of(entry)] for number, entry in launches.items()}
        few = gpu_lists.counted_alike(size, QUANT)
        many = {number: count for part in self.parts for number, count in part.alike.items()}
        self.work = {
            number: Work.of(self.counted[number], entry, many[number] / few[key_of(entry)])
            for number, entry in launches.items()
        }

    def between(self) -> list[Pass]:
        """PyTorch's own kernels: gradients that several programs read, and the norm of all."""
        shared, memory = Pass("shared weights", 2), Pass("memory's gradient", gpu_lists.LAYERS - 1)
        table = float(self.size.vocabulary * self.size.hidden * SINGLE)
        rows = float(self.size.tokens * self.size.hidden * 2)
        for one, bytes in ((shared, table), (memory, rows)):
            one.move("gradients", [one.new(bytes), one.new(bytes)], bytes)
        norm = Pass("norm", 1)
        norm.move("gradients", [norm.new(float(SINGLE * self.parameters))], float(SINGLE))
        return [shared, memory, norm]

    def times(self, gpu: Gpu) -> Iterator[tuple[str, int, Time]]:
        """(kernel, how often, time of one) of every launch.

        Kernels end the products that they end untuned.
        """
        for part in self.parts:
            clock, entries = Clock(gpu), iter(without_transposes(part.entries, gpu))
            for entry in entries:
                if isinstance(entry, Launch) and entry.kernel.name in ALONE:
                    product, end = logits(entry), without_main_loop(self.work[id(entry)])
                    key = ProductKey(
                        op=ALONE[entry.kernel.name], m=product.m, n=product.n, k=product.k
                    )
                    tile = default_tile(key, gpu.sm, gpu.multiprocessors)
                    yield entry.kernel.name, part.times, clock.ended_product(product, end, tile)
                    continue
                if isinstance(entry, Launch):
                    taken, work = resources(entry, gpu.target), self.work[id(entry)]
                    if entry.kernel.name == BEGIN and by_mma(product_after(part, entry), gpu):
                        work = without_transposition(work, entry)
                    yield entry.kernel.name, part.times, clock.kernel(work, *taken)
                    continue
                tile = default_tile(key_of_product(entry), gpu.sm, gpu.multiprocessors)
                if tile is None:
                    yield "product", part.times, clock.product(multiplied(entry))
                else:
                    end = self.work[id(next(entries))]
                    yield (
                        ENDED[entry.op],
                        part.times,
                        clock.ended_product(multiplied(entry), end, tile),
                    )
        yield from opponent_times(self.between(), gpu)


def without_transposes(
    entries: tuple[Launch | Product, ...], gpu: Gpu
) -> Iterator[Launch | Product]:
    """Launches without those that transpose codes for a product by mma.sync, which needs none."""
    for entry, following in zip(entries, (*entries[1:], None), strict=True):
        if getattr(entry, "kernel", None) != TRANSPOSE or not by_mma(following, gpu):
            yield entry


def by_mma(entry: Launch | Product | None, gpu: Gpu) -> bool:
    """Whether tiles of mma.sync make this product, untuned."""
    if not isinstance(entry, Product):
        return False
    tile = default_tile(key_of_product(entry), gpu.sm, gpu.multiprocessors)
    return tile is not None and tile.instruction == "mma"


def product_after(part: gpu_lists.Part, entry: Launch) -> Product:
    """The first product behind a launch."""
    behind = itertools.dropwhile(lambda one: one is not entry, part.entries)
    return next(one for one in behind if isinstance(one, Product))


def without_transposition(work: Work, entry: Launch) -> Work:
    """The work of BEGIN where the gradient's codes stay as they are."""
    operation, transposed, *_ = entry.arguments
    reads, writes = dict(work.reads), dict(work.writes)
    moved = reads.pop(place_of(operation.gradient.codes), 0.0)
    moved += writes.pop(place_of(transposed), 0.0)
    sectors = work.sectors - moved / SECTOR
    return dataclasses.replace(work, reads=reads, writes=writes, sectors=sectors)


def opponent_times(passes: list[Pass], gpu: Gpu) -> Iterator[tuple[str, int, Time]]:
    """(kernel, how often, time of one) of passes whose bytes and products are known."""
    for one in passes:
        clock = Clock(gpu)
        for name, moved in one.kernels:
            yield (
                name,
                one.times,
                clock.product(moved) if isinstance(moved, Multiplied) else clock.moved(moved),
            )


def multiplied(entry: Product) -> Multiplied:
    """The work of a product in a list."""
    m, k = reversed(entry.a.shape) if entry.transpose_a else entry.a.shape
    operands = {place_of(tensor): float(bytes_of(tensor)) for tensor in (entry.a, entry.b)}
    return Multiplied(
        m=m,
        n=entry.out.shape[1],
        k=k,
        int8=entry.a.element_size() == 1,
        reads=operands,
        writes={place_of(entry.out): float(bytes_of(entry.out))},
    )


def logits(entry: Launch) -> Multiplied:
    """The product with the vocabulary that a kernel makes and ends."""
    given = entry.arguments[0].prediction
    operands = {
        place_of(tensor): float(bytes_of(tensor)) for tensor in (given.x.tensor, given.weight.codes)
    }
    return Multiplied(
        m=given.rows,
        n=given.columns,
        k=given.x.tensor.shape[1],
        int8=True,
        reads=operands,
        writes={},
    )


def without_main_loop(work: Work) -> Work:
    """The work of a kernel beyond the main loop of its product."""
    multiplied = work.instructions["mma"]
    ended = {
        kind: number - MAIN_LOOP.get(kind, 0) * multiplied
        for kind, number in work.instructions.items()
    }
    return dataclasses.replace(work, instructions=ended)


def resources(entry: Launch, target: str) -> tuple[int, int]:
    """Registers of a thread, bytes of shared memory of a block."""
    kernel = entry.kernel
    taken = compiler.compile_kernels(kernel.source, kernel.defines, target).resources[kernel.name]
    return taken.registers, taken.shared_bytes + entry.shared


def rows(side: str, times: Iterator[tuple[str, int, Time]]) -> list[Row]:
    """A row for each kernel, and one for the gaps; the longest first."""
    found: dict[str, list[tuple[int, Time]]] = defaultdict(list)
    for name, count, time in times:
        found[name].append((count, time))
    made, gaps, launches = [], 0.0, 0
    for name, parts in found.items():
        bounds = Counter()
        for count, time in parts:
            bounds[time.bound] += count * time.seconds
            gaps += count * time.gap
        number = sum(count for count, _ in parts)
        launches += number
        made.append(
            Row(
                side=side,
                kernel=name,
                group=group_of(name),
                launches=number,
                bound=bounds.most_common(1)[0][0],
                milliseconds=1e3 * sum(bounds.values()),
                gigabytes=1e-9 * sum(count * time.bytes for count, time in parts),
            )
        )
    made.sort(key=lambda row: -row.milliseconds)
    gap = Row(
        side=side,
        kernel=GAPS,
        group=GAPS,
        launches=launches,
        milliseconds=1e3 * gaps,
        bound=GAPS,
        gigabytes=0.0,
    )
    return [*made, gap]


def sides(step: Step, gpu: Gpu) -> dict[str, Iterator[tuple[str, int, Time]]]:
    """The times of every side on a GPU."""
    found = {
        side: opponent_times(Model(step.size, side, step.parameters).step(), gpu) for side in SIDES
    }
    return {**found, LSQ: step.times(gpu)}


def seconds(times: Iterator[tuple[str, int, Time]]) -> float:
    """Seconds of a whole step."""
    return sum(count * total([time]) for _, count, time in times)


def step_on(gpu: Gpu, size: operations.Size, counts: dict[str, Profile]) -> Step:
    """The step as a GPU gets it: so many blocks, such weights. Raises ValueError as `Step`."""
    blocks = mock.patch.object(geometry, "MULTIPROCESSORS", gpu.multiprocessors)
    with blocks, gpu_lists.transposed_weights(gpu.sm in FASTER_LIBRARIES):
        return Step(size, counts)


def model(step: Step, gpu: Gpu) -> dict:
    """A step of every side on a GPU."""
    found = {side: rows(side, times) for side, times in sides(step, gpu).items()}
    unlucky, lucky = (
        {side: 1e3 * seconds(times) for side, times in sides(step, variant(gpu, luck)).items()}
        for luck in LUCK
    )
    whole = {side: sum(row.milliseconds for row in of_side) for side, of_side in found.items()}
    return {
        "gpu": gpu.name,
        "model": step.size.name,
        "tokens": step.size.tokens,
        "sides": [
            {
                "side": side,
                "modelled_milliseconds": whole[side],
                "with_luck": lucky[side],
                "without": unlucky[side],
                "launches": of_side[-1].launches,
                "gigabytes": sum(row.gigabytes for row in of_side),
                "ratio": whole["compiled"] / whole[side],
                "groups": {
                    group: sum(row.milliseconds for row in of_side if row.group == group)
                    for group in (*GROUPS, GAPS)
                },
            }
            for side, of_side in found.items()
        ],
        "kernels": [dataclasses.asdict(row) for row in found[LSQ]],
    }


ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "benchmarks/results/gpu_kernel_counts.json"
RESULTS = ROOT / "benchmarks/results/gpu_step_modelled.json"
ACCESSES = ("reads", "writes", "atomics")
FIGURES = tuple(field.name for field in dataclasses.fields(Traffic))
TOKENS = 8192
WIDE = operations.Size(
    name="wide", hidden=2048, feed_forward=8192, heads=32, sentences=TOKENS // operations.LENGTH
)
MODELS = [*sizes(TOKENS), WIDE]
KNOWN = (
    ("H100 SXM", None, 3.0, ONE_H100),
    ("H100 SXM", 8192, 798.0, f"{ONE_H100}, random data"),
    ("RTX 4090", 8192, 160.2, SIZES_4090),
    ("RTX 4090", 4096, 151.5, SIZES_4090),
    ("RTX 4090", 2048, 164.8, SIZES_4090),
    ("RTX 4090", 1024, 126.8, SIZES_4090),
    ("A100 80 GB", 8192, 267.0, f"{A100_BF16}, the largest"),
)
"""GPU, size of a square product in bfloat16 (None: a copy), the TFLOP/s (TB/s) that somebody
measured, where."""
WIDTHS = {size.name: size.hidden for size in (*MODELS, QUICK)}
"""Model -> its hidden size."""
COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C7", "0.8")


def load(path: Path) -> dict[str, Profile]:
    """What an earlier count has found.

    Raises:
        OSError: there is no such file.
    """

    def traffics(found: list) -> list[Traffic]:
        return [Traffic(**dict(zip(FIGURES, one, strict=False))) for one in found]

    found = {}
    for key, kept in json.loads(path.read_text(encoding="utf-8")).items():
        operands = [
            Operand(bytes=size, **dict(zip(ACCESSES, traffics(found), strict=True)))
            for size, *found in kept.pop("operands")
        ]
        elsewhere = tuple(traffics(kept.pop("elsewhere")))
        found[key] = Profile(**kept, operands=tuple(operands), elsewhere=elsewhere)
    return found


def save(counts: dict[str, Profile], path: Path) -> None:
    """Keep a count for `load`, a kernel a line."""

    def figures(traffic: Traffic) -> list[int]:
        return list(dataclasses.astuple(traffic)) if traffic.requests else []

    def kept(one: Profile) -> dict:
        operands = [
            [place.bytes, *(figures(getattr(place, kind)) for kind in ACCESSES)]
            for place in one.operands
        ]
        return {**vars(one), "operands": operands, "elsewhere": list(map(figures, one.elsewhere))}

    lines = [f"{json.dumps(key)}: {json.dumps(kept(one))}" for key, one in sorted(counts.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def checks() -> list[dict]:
    """The model beside what is known."""
    gpus = {gpu.name: gpu for gpu in GPUS}
    half = float(1 << 30)
    found = []
    for name, side, measured, source in KNOWN:
        clock = Clock(gpus[name])
        if side is None:
            what = "copy of 1 GiB, TB/s"
            modelled = 2 * half / clock.moved(Moved(reads={0: half}, writes={1: half})).total / TERA
        else:
            what = f"bfloat16 product of {side}, TFLOP/s"
            matrix = float(2 * side * side)
            product = Multiplied(
                m=side, n=side, k=side, reads={0: matrix, 1: matrix}, writes={2: matrix}
            )
            modelled = 2.0 * side**3 / clock.product(product).total / TERA
        found.append(
            {
                "gpu": name,
                "figure": what,
                "modelled": modelled,
                "measured": measured,
                "source": source,
            }
        )
    return found


def table_rows(results: list[dict]) -> list[dict]:
    """A line for each side."""
    return [
        {
            "gpu": result["gpu"],
            "model": result["model"],
            "tokens": result["tokens"],
            **{key: value for key, value in side.items() if key != "groups"},
            **side["groups"],
        }
        for result in results
        for side in result["sides"]
    ]


def page_table(results: list[dict]) -> str:
    """The table of docs/gpu.md: milliseconds of each side, and lsq's best and worst."""
    names = {f"{result['model']}, {WIDTHS[result['model']]:,}": None for result in results}
    rows: dict[str, list[str]] = {}
    for result in results:
        sides = {side["side"]: side for side in result["sides"]}
        times = ", ".join(rounded(sides[side]["modelled_milliseconds"]) for side in (*SIDES, LSQ))
        best, worst = (rounded(sides[LSQ][luck]) for luck in ("with_luck", "without"))
        rows.setdefault(result["gpu"], []).append(f"{times} ({best}–{worst})")
    lines = [["modelled", *names], ["---"] * (1 + len(names))]
    lines += [[gpu, *cells] for gpu, cells in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rounded(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 9.95 else f"{milliseconds:.1f}"


def draw(results: list[dict], path: Path) -> None:
    """Stacked bars, a panel for each GPU and model."""
    names = list(dict.fromkeys(result["gpu"] for result in results))
    models = list(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(4.2 * len(names), 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(names), squeeze=False)
    for result in results:
        axes = panels[models.index(result["model"]), names.index(result["gpu"])]
        begins = [0.0] * len(result["sides"])
        labels = [LABELS[side["side"]] for side in result["sides"]]
        for group, colour in zip((*GROUPS, GAPS), COLOURS, strict=True):
            heights = [side["groups"][group] for side in result["sides"]]
            axes.bar(labels, heights, bottom=begins, color=colour, label=group)
            begins = [begin + height for begin, height in zip(begins, heights, strict=True)]
        for place, side in enumerate(result["sides"]):
            axes.plot(
                [place] * 2,
                [side["with_luck"], side["without"]],
                color="black",
                marker="_",
                linewidth=1,
            )
        axes.set_title(f"{result['model']}, {result['gpu']}: modelled", fontsize="medium")
        axes.set_ylabel("milliseconds a step, modelled")
        axes.grid(axis="y", alpha=0.25)
    parts = panels[0, 0].get_legend_handles_labels()
    figure.legend(*parts, loc="outside lower center", ncols=len(COLOURS), fontsize="small")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, counted anew: only checks that it runs"
    )
    parser.add_argument(
        "--count", action="store_true", help="count the kernels anew, and keep that in --counts"
    )
    parser.add_argument(
        "--counts", type=Path, default=COUNTS, metavar="FILE", help="what was counted of kernels"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything as a JSON object"
    )
    parser.add_argument(
        "--assumptions",
        action="store_true",
        help="print where each number is from, as a table in Markdown, and end",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw stacked bars")
    options = parser.parse_args(arguments)
    if options.assumptions:
        print(gpu_assumptions.markdown(), end="")
        return 0
    chosen = [QUICK] if options.quick else MODELS
    if options.quick or options.count:
        counts = gpu_lists.count_kernels(chosen, QUANT)
        if not options.quick:
            save(counts, options.counts)
    else:
        counts = load(options.counts)
    try:
        results = [model(step_on(gpu, size, counts), gpu) for size in chosen for gpu in GPUS]
    except ValueError as error:
        parser.error(str(error))
    conditions = {
        "device": "none: every time is modelled",
        "nvrtc": compiler.version(),
        "quant": repr(QUANT),
        "dropout": gpu_lists.DROPOUT,
        "gpus": {gpu.name: repr(gpu) for gpu in GPUS},
        "gap_microseconds": H100.gap / MICRO,
        "baseline": "compiled",
    }
    rows, beside = table_rows(results), checks()
    for title, lines in (("modelled steps", rows), ("checks", beside)):
        print(f"{title}\n\n{common.table(lines)}\n")
    print(f"for docs/gpu.md\n\n{page_table(results)}")
    line = {
        "benchmark": "gpu_step_modelled",
        "conditions": conditions,
        "rows": rows,
        "checks": beside,
        "kernels_by_gpu": results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
