"""One training step of a Transformer: fairseq, plain PyTorch in bfloat16 (also compiled), torchao's
int8, lsq's int8.

A step is forward, label-smoothed loss, backward and Adam (lsq's own, PyTorch's fused one in plain
PyTorch, else fairseq's), on the same random batches for each side.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import common
import limits
import transformer
from limits import PARTS, REST, UPDATE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile

from lsq.commands.step_memory import saved_tensors
from lsq.layers.memory import plan_memory, release_memory
from lsq.run import executor

SIDE = "lsq int8, backward int8"
"""Whose step is drawn in parts."""
OTHERS = "fairseq", "pytorch"
"""How the names of the sides begin that it is drawn beside."""
COLOURS = {part: f"C{number}" for number, part in enumerate((*PARTS, UPDATE))} | {REST: "0.7"}
ALLOWED = "at the peak of processor\nand memory"
LEAST_LABELLED = 0.03
"""Of the longest bar: a shorter part has no figure in it."""


def draw(
    rows: Sequence[Mapping],
    parts: Mapping[str, Mapping[str, float]],
    limits: Mapping | None,
    output: Path,
) -> None:
    """Two panels: steps of all sides, and lsq's in parts beside what is allowed.

    Args:
        rows: of the table.
        parts: side -> part -> seconds.
        limits: what limits.measured returned.
        output: the picture.

    Raises:
        ValueError: the side that is drawn was not measured, or no limits.
    """
    if SIDE not in parts or limits is None:
        raise ValueError(
            f"a picture needs the side {SIDE!r} and the limits of a processor with VNNI or AMX;"
            " measure again on such a one"
        )
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    seconds = {row["side"]: row["seconds"] for row in rows if row["side"].startswith(OTHERS)}
    names = [*seconds, SIDE]
    left.bar(range(len(seconds)), seconds.values(), color="0.5", width=0.7)
    _stack(left, len(seconds), parts[SIDE])
    longest = max(seconds.values())
    for place, value in enumerate([*seconds.values(), sum(parts[SIDE].values())]):
        left.text(place, value + longest / 100, f"{value:.2f}", ha="center", va="bottom")
    left.set_xticks(range(len(names)), [_in_lines(name) for name in names], fontsize="small")
    left.set_ylabel("seconds a step")
    for place, each in enumerate((parts[SIDE], limits["seconds"])):
        _stack(right, place, each, labelled=LEAST_LABELLED * sum(parts[SIDE].values()))
        total = sum(each.values())
        right.text(place, total * 1.005, f"{total:.2f}", ha="center", va="bottom")
    right.set_xticks(range(2), [_in_lines(SIDE), ALLOWED], fontsize="small")
    handles, labels = right.get_legend_handles_labels()
    pairs = dict(zip(labels, handles, strict=True))
    right.legend(reversed(pairs.values()), reversed(pairs), fontsize="small", loc="upper right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=110)


def _stack(
    axes: Axes, place: int, parts: Mapping[str, float], labelled: float | None = None
) -> None:
    """One bar; with figures in those parts of it that take at least `labelled` seconds."""
    bottom = 0.0
    for part, colour in COLOURS.items():
        axes.bar(place, parts[part], bottom=bottom, color=colour, width=0.7, label=part)
        if labelled is not None and parts[part] >= labelled:
            middle = bottom + parts[part] / 2
            axes.text(
                place,
                middle,
                f"{parts[part]:.3f}",
                ha="center",
                va="center",
                fontsize="small",
                color="white",
            )
        bottom += parts[part]


def _in_lines(name: str) -> str:
    return (
        name.replace(", ", ",\n")
        .replace(" bfloat16 ", "\nbfloat16\n")
        .replace("fairseq ", "fairseq\n")
    )


FAIRSEQ, LSQ = transformer.FAIRSEQ, transformer.LSQ
OPERATIONS = 15
"""Operations (and kinds of saved tensors) listed for each side, the largest."""
WARM_UP = common.SETTLED
"""Steps of each side that are not timed: the first ones measure clips, and touch memory for the
first time."""


def _side(*arguments: str, **options) -> Callable:
    return functools.partial(transformer.Side, arguments=arguments, **options)


LSQ_NAME = "lsq"
"""Sides whose name begins with this train in planned memory, as the plugin does."""
SIDES: dict[str, Callable] = {
    "fairseq float32": _side(*FAIRSEQ),
    "fairseq bfloat16": _side(*FAIRSEQ, autocast=True),
    "pytorch bfloat16 eager": transformer.PlainSide,
    "pytorch bfloat16 compiled": functools.partial(transformer.PlainSide, backend="inductor"),
    "torchao int8": _side(*FAIRSEQ, change=transformer.torchao_int8),
    "torchao int8, bfloat16": _side(*FAIRSEQ, change=transformer.torchao_int8, autocast=True),
    "lsq int8, backward float32": _side(*LSQ, "--lsq-backward", "float"),
    "lsq int8, backward int8": _side(*LSQ, "--lsq-backward", "int8"),
}
"""Name -> what builds the side for a shape."""
COMPILED = "pytorch bfloat16 compiled"
BASELINE, HALF = "fairseq float32", "fairseq bfloat16"


class TimedSide:
    """A side with its own turn through the batches and the seconds of each phase of its steps."""

    def __init__(self, side: transformer.Side, batches: list[dict]):
        self.side = side
        self.batches = itertools.cycle(batches)
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}

    def step(self) -> None:
        sample = next(self.batches)
        loss = self._timed("forward", lambda: self.side.loss(sample))
        self._timed("backward", lambda: self.side.backward(sample, loss))
        self._timed("update", self.side.update)

    def _timed(self, phase: str, run: Callable):
        start = time.perf_counter()
        result = run()
        self.phases[phase].append(time.perf_counter() - start)
        return result

    def medians(self, rounds: int) -> dict[str, float]:
        """Median seconds of each phase over the last `rounds` steps."""
        return {
            phase: common.timing(values[-rounds:]).median for phase, values in self.phases.items()
        }


def saved_bytes(side: transformer.Side, shape: transformer.Shape) -> dict:
    """Bytes kept for backward by a full batch, and the share of them that does not grow with the
    batch.

    The latter are copies of the weights, which autocast and int8 products make; measured with half
    a batch.
    """

    def kept(sentences: int):
        sample = transformer.batch(
            dataclasses.replace(shape, sentences=sentences), padded=False, seed=1
        )
        return saved_tensors(lambda: side.loss(sample), side.model.parameters())

    full, half = kept(shape.sentences), kept(shape.sentences // 2)
    return {
        "saved_bytes": full.total(),
        "saved_bytes_of_weights": 2 * half.total() - full.total(),
        "largest_saved": dict(full.most_common(OPERATIONS)),
    }


def operation_seconds(timed: TimedSide) -> dict[str, float]:
    """Seconds of the costliest operations in one step, by name: those of lsq's programs and torch's
    outside them.

    A torch operation's own time, without what it calls; an operation of lsq with the torch
    operations inside it, which are listed as well.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler, executor.profile() as fused:
        timed.step()
    torch_seconds = {
        event.key: 1e-6 * event.self_cpu_time_total for event in profiler.key_averages()
    }
    fused_seconds = {f"lsq {name}": value for name, value in fused.items()}
    return dict(Counter({**torch_seconds, **fused_seconds}).most_common(OPERATIONS))


def part_seconds(timed: TimedSide, rounds: int) -> dict[str, float]:
    """Seconds of each part of a step of lsq's, see limits.PARTS: its operations run one by one,
    medians of `rounds`.

    The rest is what the timed steps took beyond that.
    """
    medians, found = timed.medians(rounds), []
    for _ in range(rounds):
        with executor.profile() as fused:
            timed.step()
        found.append(dict(fused))
    seconds = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return limits.parts(seconds, medians["update"], sum(medians.values()))


def build(
    shape: transformer.Shape, wanted: list[str] | None, quick: bool
) -> tuple[dict, dict[str, str]]:
    """Make the sides; with `quick`, none of them waits for a C++ compiler.

    Returns:
        name -> side, and name -> reason for those that cannot run here.
    """
    sides, missing = {}, {}
    for name, make in SIDES.items():
        if wanted and name not in (*wanted, BASELINE, HALF):
            continue
        try:
            sides[name] = (
                make(shape, backend="eager") if quick and name == COMPILED else make(shape)
            )
        except ImportError as error:
            missing[name] = str(error)
    return sides, missing


def plan_sides(sides: dict[str, transformer.Side], shape: transformer.Shape) -> dict[str, int]:
    """Plan the memory of lsq's sides; the bytes of each arena."""
    sample = transformer.batch(shape, padded=False, seed=0)
    memories = {
        name: plan_memory(side.model, lambda side=side: side.loss(sample))
        for name, side in sides.items()
        if name.startswith(LSQ_NAME)
    }
    return {name: memory.arena.size for name, memory in memories.items() if memory is not None}


def print_operations(operations: dict[str, dict[str, float]], kept: dict[str, dict]) -> None:
    """Where each side's time goes and what it keeps for backward."""
    for name, seconds in operations.items():
        largest = kept[name]["largest_saved"]
        print(f"{name}: operations of one step")
        print(
            common.table([{"operation": key, "seconds": value} for key, value in seconds.items()])
        )
        print(f"\n{name}: largest tensors kept for backward")
        print(
            common.table(
                [{"tensor": key, "megabytes": 1e-6 * value} for key, value in largest.items()]
            )
        )
        print()


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--padded", action="store_true", help="sentences of different lengths in a batch"
    )
    parser.add_argument("--naive-memory", action="store_true", help="lsq without planned memory")
    parser.add_argument(
        "--batches", type=common.positive, default=3, metavar="N", help="batches, in turn"
    )
    parser.add_argument(
        "--side",
        action="append",
        choices=SIDES,
        metavar="NAME",
        help="only this and float; repeatable",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw where a step's time goes"
    )
    options = common.parse(parser, arguments)
    shape = transformer.QUICK if options.quick else transformer.Shape()
    batches = [
        transformer.batch(shape, padded=options.padded, seed=seed)
        for seed in range(options.batches)
    ]
    sides, missing = build(shape, options.side, options.quick)
    parameters = sum(parameter.numel() for parameter in sides[BASELINE].model.parameters())
    possible = limits.measured(shape, parameters)
    arenas = {} if options.naive_memory else plan_sides(sides, shape)

    timed = {name: TimedSide(side, batches) for name, side in sides.items()}
    timings = common.alternate(
        {name: side.step for name, side in timed.items()}, rounds=options.rounds, warm_up=WARM_UP
    )
    phases = {name: side.medians(options.rounds) for name, side in timed.items()}
    first_steps = {
        name: sum(values[0] for values in side.phases.values()) for name, side in timed.items()
    }
    parts = {
        name: part_seconds(side, options.rounds)
        for name, side in timed.items()
        if name.startswith(LSQ_NAME)
    }
    operations = {name: operation_seconds(side) for name, side in timed.items()}
    for side in sides.values():
        release_memory(side.model)  # a view of the arena would count as all of it
    kept = {name: saved_bytes(side, shape) for name, side in sides.items()}

    strongest = min(
        (name for name in timings if not name.startswith(LSQ_NAME)),
        key=lambda name: timings[name].median,
    )
    rows = [
        {
            "side": name,
            "seconds": timing.median,
            "fastest": timing.fastest,
            "first_step": first_steps[name],
            "ratio": timings[BASELINE].median / timing.median,
            "ratio_to_strongest": timings[strongest].median / timing.median,
            "ratio_to_bfloat16": timings[HALF].median / timing.median,
            **phases[name],
            "saved_megabytes": 1e-6 * kept[name]["saved_bytes"],
            "saved_to_bfloat16": kept[name]["saved_bytes"] / kept[HALF]["saved_bytes"],
            "arena_megabytes": 1e-6 * arenas.get(name, 0),
        }
        for name, timing in timings.items()
    ]
    print_operations(operations, kept)
    common.report(
        "step",
        rows,
        common.conditions(
            options,
            packages=("fairseq-fixed", "torchao"),
            baseline=BASELINE,
            strongest=f"{strongest}, the fastest side that is not of lsq",
            shape=dataclasses.asdict(shape),
            padded=options.padded,
            target_tokens=[sample["ntokens"] for sample in batches],
            optimizer="fairseq.optim.adam.Adam; lsq: lsq.optim.Adam; plain PyTorch:"
            " torch.optim.Adam(fused=True)",
            calibration="in the first step only, which is not timed",
            memory="fresh" if options.naive_memory else "lsq: planned ahead for the largest batch",
            missing=missing,
        ),
        options,
        operations=operations,
        saved=kept,
        parts=parts,
        limits=possible,
    )
    if options.picture is not None:
        draw(rows, parts, possible, options.picture)


if __name__ == "__main__":
    main()
