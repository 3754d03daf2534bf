"""`lsq plan`: choose offsets for the buffers of a file or of a training step, with a small peak."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from lsq.commands.options import (
    Count,
    File,
    Seconds,
    check_writable,
    command_parser,
    is_given,
    one_line_errors,
    positive,
)
from lsq.memory.buffers import Buffer, Plan
from lsq.memory.files import alive_at_peak, draw, read_buffers, save_plan, write_plan
from lsq.memory.planner import METHODS, TIME_LIMIT, plan

SHOWN = 10


TRAINING = "--criterion lsq_label_smoothed_cross_entropy --optimizer lsq_adam".split()
"""Default options of fairseq-train for a planned step."""
Bytes = Annotated[int, positive, "BYTES"]


class Options(Namespace):
    """Choose offsets for buffers, so that buffers that are alive at the same time do not overlap,
    and say how much memory they need and why. The plan is checked before it is shown. The buffers
    come from a file, or from a training step: lsq plan --arch lsq_transformer_wmt_en_de
    --max-tokens 4096 --max-source-positions 256 --max-target-positions 256, with any options of lsq
    train: --lsq-device cuda plans for a GPU, without one. lsq plan --model FOLDER --batch 4x2048
    --budget 24GB says how the full training of a language model fits into memory; lsq plan --model
    FOLDER --help lists its options."""

    arch: Annotated[str, "NAME"] | None = None
    """plan a training step of this architecture"""
    vocabulary_size: Count = 32000
    """words of the joined vocabulary, with --arch"""
    output: Annotated[Path, "PLAN"] | None = None
    """write id,offset; or all of the plan, if it ends in .json"""
    method: Annotated[str, METHODS] = "portfolio"
    """how to plan"""
    capacity: Bytes | None = None
    """most bytes that the plan should take"""
    time_limit: Seconds = TIME_LIMIT
    """seconds for --method exact"""
    plot: File | None = None
    """draw a map of the memory (.png, .svg, .pdf)"""
    quiet: bool = False
    """no progress bar"""


def parser(of_file: bool = True) -> ArgumentParser:
    made = command_parser("plan", Options)
    if of_file:
        columns = "id,lower,upper,size[,alignment][,offset]; alive on [lower, upper)"
        made.add_argument(
            "file", type=Path, metavar="FILE.csv", help=f"{columns}; or give --arch NAME instead"
        )
        made.add_argument(
            "--align", type=positive, default=1, metavar="N", help="alignment if the file has none"
        )
    return made


def report(buffers: list[Buffer], plan: Plan) -> str:
    lines = [
        f"buffers      {len(buffers)}",
        f"peak         {plan.peak} bytes ({plan.peak / 2**20:.1f} MiB)",
        f"lower bound  {plan.lower_bound} bytes",
        f"gap          {plan.gap:.4%}",
        f"method       {plan.method}",
        f"time         {plan.seconds * 1000:.1f} ms",
    ]
    if plan.capacity_met is not None:
        lines.append(f"capacity     {'met' if plan.capacity_met else 'not met'}")
    time, alive = alive_at_peak(buffers)
    lines.append(f"alive at operation {time}, where most bytes are: {len(alive)} buffers")
    lines += [
        f"  {buffer.size:14}  {buffer.name}  ({buffer.first} to {buffer.last})"
        for buffer in alive[:SHOWN]
    ]
    if len(alive) > SHOWN:
        lines.append(f"  and {len(alive) - SHOWN} more")
    return "\n".join(lines)


def _buffers(arguments: list[str]) -> tuple[Namespace, list[Buffer]]:
    of_file = not is_given("--arch", arguments)
    options = parser(of_file)
    if of_file:
        given = options.parse_args(arguments)
    else:
        given, training = options.parse_known_args(arguments)
    for option, path in (("--output", given.output), ("--plot", given.plot)):
        if path is not None:
            check_writable(path, option)
    if of_file:
        return given, read_buffers(given.file, alignment=given.align)
    parsed = parse_step("lsq plan", given.arch, training)
    from lsq.commands import launch  # takes seconds; not needed for a file
    from lsq.fairseq.memory import describe_training

    backend = launch.planned(parsed)
    parsed.lsq_device = parsed.lsq_activations = None  # this machine need not have the device
    activations = str(backend.activations).removeprefix("torch.")
    print(f"planned for  {backend.name}, activations in {activations}")
    step = describe_training(parsed, given.vocabulary_size, backend)
    return given, list(step.buffers.values())


def parse_step(program: str, architecture: str, arguments: Sequence[str]) -> Namespace:
    """Parse fairseq's options of a training step, without data; ValueError or SystemExit."""
    from fairseq import options  # takes seconds

    from lsq.commands import limits
    from lsq.fairseq import architectures

    of_fairseq = options.get_training_parser(default_task=architectures.model_of(architecture).task)
    of_fairseq.prog = program
    one_line_errors(of_fairseq)
    command = ["unused-data-folder", *TRAINING, "--arch", architecture, *arguments]
    parsed = options.parse_args_and_arch(of_fairseq, command)
    limits.check(parsed)
    return parsed


def run(arguments: list[str]) -> int:
    """Plan, report, and write; LibraryError if exact is asked for without the C++ library."""
    if is_given("--model", arguments):
        from lsq.commands import plan_training  # takes seconds

        return plan_training.run(arguments)
    given, buffers = _buffers(arguments)
    hidden = given.quiet or given.method != "exact" or None
    shown = {"desc": "searching", "unit": " positions", "unit_scale": True, "leave": False}
    with tqdm(disable=hidden, **shown) as bar:
        result = plan(
            buffers,
            method=given.method,
            capacity=given.capacity,
            time_limit=given.time_limit,
            progress=lambda tried: bar.update(tried - bar.n),
        )
    print(report(buffers, result))
    if given.output is not None:
        write = save_plan if given.output.suffix == ".json" else write_plan
        write(result, given.output)
    if given.plot is not None:
        draw(buffers, result, given.plot)
    return 0
