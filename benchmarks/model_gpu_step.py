"""Models a training step on GPUs, lsq's as its kernels stand and its opponents' at their best:
nothing is measured.

lsq's launches are those of its real lists; what kernels do is counted in the emulator (--count,
minutes), or taken from the file of an earlier count. Registers are NVRTC's. See docs/gpu.md.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import common
import gpu_lists
from gpu_model import GPUS, H100, MICRO, TERA, Clock, Moved, Multiplied
from gpu_step import GAPS, GROUPS, QUANT, Step, kernel_rows, model
from matplotlib.figure import Figure
from operations import QUICK, sizes

from lsq.emulator.profile import Operand, Profile, Traffic
from lsq.native import compiler

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "benchmarks/results/gpu_kernel_counts.json"
ACCESSES = ("reads", "writes", "atomics")
FIGURES = tuple(field.name for field in dataclasses.fields(Traffic))
TOKENS = 8192
ONE_H100 = "seen on one H100 80GB HBM3, PyTorch 2.11"
FOUR_SIZES = "zzc0721/torch-performance-test-data, issue 78"
KNOWN = (
    ("H100 SXM", None, 3.0, ONE_H100),
    ("H100 SXM", 8192, 798.0, ONE_H100 + ", random data"),
    ("RTX 4090", 8192, 160.2, FOUR_SIZES),
    ("RTX 4090", 4096, 151.5, FOUR_SIZES),
    ("RTX 4090", 2048, 164.8, FOUR_SIZES),
    ("RTX 4090", 1024, 126.8, FOUR_SIZES),
    ("A100 80 GB", 8192, 267.0, "triton-lang/triton, issue 4876, the largest"),
)
"""GPU, size of a square product in bfloat16 (None: a copy), the TFLOP/s (TB/s) that somebody
measured, where."""
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


def draw(results: list[dict], path: Path) -> None:
    """Stacked bars, a panel for each GPU and model."""
    names = list(dict.fromkeys(result["gpu"] for result in results))
    models = list(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(4.2 * len(names), 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), len(names), squeeze=False)
    for result in results:
        axes = panels[models.index(result["model"]), names.index(result["gpu"])]
        begins = [0.0] * len(result["sides"])
        labels = [side["side"] for side in result["sides"]]
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw stacked bars")
    options = parser.parse_args(arguments)
    chosen = [QUICK] if options.quick else sizes(TOKENS)
    if options.quick or options.count:
        counts = gpu_lists.count_kernels(chosen, QUANT)
        if not options.quick:
            save(counts, options.counts)
    else:
        counts = load(options.counts)
    try:
        steps = [Step(size, counts) for size in chosen]
    except ValueError as error:
        parser.error(str(error))
    results = [model(step, gpu) for step in steps for gpu in GPUS]
    conditions = {
        "device": "none: every time is modelled",
        "nvrtc": compiler.version(),
        "quant": repr(QUANT),
        "dropout": gpu_lists.DROPOUT,
        "gpus": {gpu.name: repr(gpu) for gpu in GPUS},
        "gap_microseconds": H100.gap / MICRO,
        "baseline": "compiled",
    }
    kernels = kernel_rows(steps[-1], H100)
    for title, lines in (
        ("modelled steps", table_rows(results)),
        ("kernels", kernels),
        ("checks", checks()),
    ):
        print(f"{title}\n\n{common.table(lines)}\n")
    line = {
        "benchmark": "gpu_step_modelled",
        "conditions": conditions,
        "rows": table_rows(results),
        "kernels": kernels,
        "checks": checks(),
        "kernels_by_gpu": results,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(line) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(results, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
