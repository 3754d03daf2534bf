"""Memory of a training step: what PyTorch's allocator peaks at, side by side with lsq's planned
arena.

Three tables. One is measured: a forward and backward pass of fairseq's transformer in float32 and
bfloat16 and of lsq int8, with fresh memory for every tensor and with the planned arena, every event
of the allocator traced; once with gradients that exist before, to which the pass adds, and once
with gradients that are None before, as in every update of fairseq. The other is planned alone, on
the CPU and on a GPU (which needs none, and has activations in bfloat16): what a step of larger
models takes, how far from the lower bound, and how long planning took. The third is measured on one
pair
of long sentences and one layer on each side: what attention takes as they grow.
"""

import dataclasses
from dataclasses import dataclass

import common
import torch
import transformer

from lsq.commands.step_memory import saved_tensors, traced_peak
from lsq.fairseq import device
from lsq.layers.memory import describe_memory, plan_memory, release_memory
from lsq.memory.kept import nothing_kept
from lsq.run.backends import backend
from lsq.run.step import StepPlan

FAIRSEQ, LSQ = transformer.FAIRSEQ, transformer.LSQ
INT8 = [*LSQ, "--lsq-backward", "int8"]
SIDES: dict[str, dict] = {
    "fairseq float32": {"arguments": FAIRSEQ},
    "fairseq bfloat16": {"arguments": FAIRSEQ, "autocast": True},
    "lsq int8, backward float32": {"arguments": [*LSQ, "--lsq-backward", "float"], "modes": True},
    "lsq int8, backward int8": {"arguments": INT8, "modes": True},
}
GRADIENTS = "exist", "none"
BASELINE, HALF = "fairseq float32", "fairseq bfloat16"
BASE = transformer.Shape()
BIG = transformer.Shape(hidden=1024, feed_forward=4096, heads=16)
LONG = dataclasses.replace(BASE, layers=1, vocabulary=1024, sentences=1)
"""For long sentences: attention's memory beside as little else as can be."""
LENGTHS = 1024, 2048, 4096


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its largest batch."""

    name: str
    shape: transformer.Shape


def sizes(quick: bool) -> list[Size]:
    """What is planned: base and big, at 4,096 and 8,192 tokens, in sentences of 64."""
    if quick:
        return [Size(name="quick", shape=transformer.QUICK)]
    return [
        Size(
            name=f"{name} {tokens}",
            shape=dataclasses.replace(shape, sentences=tokens // 64, length=64),
        )
        for name, shape in (("base", BASE), ("big", BIG))
        for tokens in (4096, 8192)
    ]


def measure(
    shape: transformer.Shape, arguments: list[str], planned: bool, **options
) -> dict[str, dict]:
    """Peak, arena and kept bytes of one step, by gradients before it: "exist" or "none"."""
    side = transformer.Side(shape, arguments=arguments, **options)
    sample = transformer.batch(shape, padded=False, seed=1)
    with nothing_kept():  # as in what is traced, for which passes are prepared here
        # gradients exist from here on
        common.settle(lambda: side.backward(sample, side.loss(sample)))
    kept = saved_tensors(lambda: side.loss(sample), side.model.parameters()).total()
    memory = plan_memory(side.model, lambda: side.loss(sample)) if planned else None
    arena = memory.arena.size if memory else 0
    found = {}
    for gradients in GRADIENTS:
        if gradients == "none":
            side.model.zero_grad(set_to_none=True)
        peak = traced_peak(lambda: side.backward(sample, side.loss(sample)))
        found[gradients] = {
            "allocated": peak,
            "arena": arena,
            "together": peak + arena,
            "kept_for_backward": kept,
        }
    release_memory(side.model)
    return found


def measured_rows(shape: transformer.Shape) -> list[dict]:
    """One row for each side, each way of placing tensors, and what gradients are before."""
    found = {}
    for name, recipe in SIDES.items():
        recipe = dict(recipe)
        for planned in (False, True) if recipe.pop("modes", False) else (False,):
            found[f"{name}, planned" if planned else name] = measure(
                shape, planned=planned, **recipe
            )
    return [
        {
            "side": name,
            "gradients": gradients,
            **{f"{key}_megabytes": 1e-6 * value for key, value in figures.items()},
            "ratio": found[BASELINE][gradients]["together"] / figures["together"],
            "ratio_to_bfloat16": found[HALF][gradients]["together"] / figures["together"],
        }
        for gradients in GRADIENTS
        for name, figures in ((name, cases[gradients]) for name, cases in found.items())
    ]


def long_rows(shape: transformer.Shape, lengths: tuple[int, ...]) -> list[dict]:
    """Memory of a step of lsq int8 on one pair of sentences, by length; ratio: bytes a token."""
    steps = [
        measure(dataclasses.replace(shape, length=length), arguments=INT8, planned=False)["exist"]
        for length in lengths
    ]
    each = [step["allocated"] / length for length, step in zip(lengths, steps, strict=True)]
    return [
        {
            "tokens": length,
            "peak_megabytes": 1e-6 * step["allocated"],
            "kept_for_backward_megabytes": 1e-6 * step["kept_for_backward"],
            "kilobytes_a_token": 1e-3 * bytes_a_token,
            "ratio": bytes_a_token / each[0],
        }
        for length, step, bytes_a_token in zip(lengths, steps, each, strict=True)
    ]


def plan_of(size: Size, where: str = "cpu") -> StepPlan:
    """The plan of a step of lsq int8 on a batch of this size, on the CPU or on "cuda"."""
    side = transformer.Side(size.shape, arguments=INT8)
    if where == "cuda":
        device.use(side.model, backend("emulated", torch.bfloat16))  # its programs are a GPU's
    sample = transformer.batch(size.shape, padded=False, seed=1)
    return describe_memory(side.model, lambda: side.loss(sample))


def planned_row(size: Size, where: str) -> dict:
    step = plan_of(size, where)
    plan = step.plan
    return {
        "size": size.name,
        "device": where,
        "sentences": size.shape.sentences,
        "length": size.shape.length,
        "tensors": len(plan.offsets),
        "apart_megabytes": 1e-6 * sum(buffer.size for buffer in step.buffers.values()),
        "planned_megabytes": 1e-6 * plan.peak,
        "gap_percent": 100 * plan.gap,
        "planner_milliseconds": 1e3 * plan.seconds,
        "ratio": sum(buffer.size for buffer in step.buffers.values()) / plan.peak,
    }


def main(arguments: list[str] | None = None) -> None:
    options = common.parse(common.parser(__doc__), arguments)
    shape = transformer.QUICK if options.quick else transformer.Shape()
    planned = [
        planned_row(size, where) for size in sizes(options.quick) for where in ("cpu", "cuda")
    ]
    print("planned alone; ratio: bytes of all tensors side by side, against the plan's")
    print(common.table(planned), end="\n\n")
    small = dataclasses.replace(shape, sentences=1)
    long = long_rows(small, (8, 16)) if options.quick else long_rows(LONG, LENGTHS)
    print("one pair of long sentences; ratio: bytes a token, of the shortest pair's")
    print(common.table(long), end="\n\n")
    common.report(
        "memory",
        measured_rows(shape),
        common.conditions(
            options,
            packages=("fairseq-fixed",),
            baseline=BASELINE,
            shape=dataclasses.asdict(shape),
            counted="forward and backward pass; not parameters, optimizer's state and gradients"
            " that exist before",
        ),
        options,
        planned=planned,
        long=long,
    )


if __name__ == "__main__":
    main()
