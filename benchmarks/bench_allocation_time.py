"""Decoding steps beside what the times of their products predict, for weights in each format.

predicted = products of the format + rest; the rest is a step in int2/row minus its products, whose
errors are the smallest. So int2/row is predicted by itself. The model is that of bench_language.py,
and each row of a step is a text. Products are timed by lsq.study.product_times. In each round steps
and products of all formats take turns; a figure is the fastest of all rounds. With one thread,
times are the processor's. "ratio" is predicted over measured.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import common
import torch
from decoding_models import FORMATS, START, llama_architecture, packed_megabytes, random_model

from lsq.native import loader, tiles
from lsq.quant.formats import Int4
from lsq.serving.engine import Engine
from lsq.study.product_times import Product, product_times

BASELINE = "int2/row"
MIX = "int4/row,*gate_weight=int2/row,*up_weight=int2/row,*fc2_weight=int8"
"""Formats of an allocation."""
LAYERS, ROWS = (12, 24), (1, 4, 16)
SETTLING, STEPS, TOP = 16, 32, 5
"""Steps before the caches are as they stay, steps that are timed, and words that each returns."""


def step_milliseconds(engine: Engine, rows: int, clock) -> float:
    """The fastest step."""
    found = []
    engine.begin([torch.tensor([START])] * rows, rows=rows, steps=SETTLING + STEPS)
    words, parents = torch.full((rows,), START), torch.arange(rows)
    for _ in range(SETTLING + STEPS):
        begin = clock()
        engine.step(words, parents, top=TOP)
        found.append(1e3 * (clock() - begin))
    return min(found[SETTLING:])


def form_of(engine: Engine, name: str) -> str:
    """The format of a weight, as product_times takes it."""
    form = engine._preparation._model.architecture.format_of(name)
    return form.name if isinstance(form, Int4) or form.bits == 8 else f"int{form.bits}/row"


def products_milliseconds(
    products: list[tuple[str, int, int]], megabytes: float, rows: list[int]
) -> dict[int, float]:
    """Rows of a step -> the sum of its products (format, outputs, inputs), measured now."""
    wanted = [
        Product(form=form, rows=each, outputs=p, inputs=k)
        for each in rows
        for form, p, k in products
    ]
    with tempfile.TemporaryDirectory() as folder:
        times = product_times(wanted, megabytes=megabytes, path=Path(folder) / "times.json")
    return {
        each: sum(times.milliseconds(form, each, p, k) for form, p, k in products) for each in rows
    }


def measured(layers: int, options) -> Iterator[dict]:
    """The rows of a model with so many layers."""
    clock = common.clock_of(options)
    described = llama_architecture(layers, options.quick)
    engines = {form: Engine(random_model(described, form)) for form in options.formats}
    keys = [(form, rows) for form in engines for rows in options.rows]
    steps, products = {key: [] for key in keys}, {key: [] for key in keys}
    for number in range(options.rounds):
        for form, engine in engines.items():
            for rows in options.rows:
                steps[form, rows].append(step_milliseconds(engine, rows, clock))
            of_step = [
                (form_of(engine, name), weight.columns, weight.inner)
                for name, weight in engine._preparation._weights.items()
            ]
            found = products_milliseconds(of_step, packed_megabytes(engine), options.rows)
            for rows, each in found.items():
                products[form, rows].append(each)
        print(f"{layers} layers, round {number + 1} of {options.rounds}", file=sys.stderr)
    for form, rows in keys:
        step, summed = min(steps[form, rows]), min(products[form, rows])
        rest = min(steps[BASELINE, rows]) - min(products[BASELINE, rows])
        yield {
            "side": form,
            "layers": layers,
            "rows": rows,
            "weights_megabytes": packed_megabytes(engines[form]),
            "products": summed,
            "rest": rest,
            "predicted": summed + rest,
            "measured": step,
            "ratio": (summed + rest) / step,
        }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--layers", type=common.positive, nargs="+", default=LAYERS, metavar="N", help="of models"
    )
    parser.add_argument(
        "--rows", type=common.positive, nargs="+", default=ROWS, metavar="R", help="of a step"
    )
    parser.add_argument(
        "--formats", nargs="+", default=(*FORMATS, MIX), metavar="NAME", help="of weights"
    )
    options = common.parse(parser, arguments)
    options.formats = tuple(dict.fromkeys((BASELINE, *options.formats)))
    if options.quick:
        options.layers, options.rows = (1,), (1, 4)
    table = [row for layers in options.layers for row in measured(layers, options)]
    conditions = common.conditions(
        options,
        baseline=BASELINE,
        lsq_instructions=tiles.fastest(),
        clock=common.clock_of(options).__name__,
        library=loader.description(),
        load_average_at_the_end=round(os.getloadavg()[0], 2),
    )
    common.report("allocation_time", table, conditions, options)


if __name__ == "__main__":
    main()
