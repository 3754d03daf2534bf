"""`lsq plan`: choose offsets for the buffers of a file or of a training step, with a small peak."""

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from lsq.commands.options import (
    check_writable,
    command_parser,
    count,
    one_line_errors,
    positive,
    seconds,
)
from lsq.memory.files import read_buffers, save_plan, write_plan
from lsq.memory.picture import alive_at_peak, draw
from lsq.memory.planner import METHODS, TIME_LIMIT, Buffer, Plan, plan

SHOWN = 10
"""Buffers that are listed."""


TRAINING = "--criterion lsq_label_smoothed_cross_entropy --optimizer lsq_adam".split()
"""Options of fairseq-train that need not be given."""


def parser(of_file: bool = True) -> ArgumentParser:
    """The command line of `lsq plan` for a file, or for a training step."""
    result = command_parser(
        "plan",
        "Choose offsets for buffers, so that those that are alive at the same time do not overlap,"
        " and say how much memory they need and why. The plan is checked before it is shown. The"
        " buffers come from a file, or from a training step: lsq plan --arch"
        " lsq_transformer_wmt_en_de --max-tokens 4096 --max-source-positions 256"
        " --max-target-positions 256, with any options of lsq train: --lsq-device cuda plans for a"
        " GPU, without one.",
    )
    columns = "id,lower,upper,size[,alignment][,offset]; alive on [lower, upper)"
    if of_file:
        result.add_argument(
            "file", type=Path, metavar="FILE.csv", help=f"{columns}; or give --arch NAME instead"
        )
        result.add_argument(
            "--align",
            type=positive,
            default=1,
            metavar="N",
            help="alignment where the file gives none",
        )
    result.add_argument("--arch", metavar="NAME", help="plan a training step of this architecture")
    result.add_argument(
        "--vocabulary-size",
        type=count,
        default=32000,
        metavar="N",
        help="joined vocabulary, with --arch",
    )
    result.add_argument(
        "--output",
        type=Path,
        metavar="PLAN",
        help="write id,offset; or all of the plan, if it ends in .json",
    )
    result.add_argument("--method", choices=METHODS, default="portfolio", help="how to plan")
    result.add_argument(
        "--capacity", type=positive, metavar="BYTES", help="what the plan should keep to"
    )
    result.add_argument(
        "--time-limit", type=seconds, default=TIME_LIMIT, metavar="S", help="seconds for exact"
    )
    result.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw a map of the memory (.png, .svg, .pdf)"
    )
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    return result


@contextlib.contextmanager
def _progress(given: Namespace) -> Iterator[Callable[[int], None]]:
    """Within this context, the `progress` of `plan`."""
    hidden = given.quiet or given.method != "exact"
    with tqdm(
        desc="searching", unit=" positions", unit_scale=True, leave=False, disable=hidden or None
    ) as bar:
        yield lambda tried: bar.update(tried - bar.n)


def report(buffers: list[Buffer], plan: Plan) -> str:
    """The memory of a plan and its reasons, for people."""
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


def _check_outputs(given: Namespace) -> None:
    for option, path in (("--output", given.output), ("--plot", given.plot)):
        if path is not None:
            check_writable(path, option)


def _buffers(arguments: list[str]) -> tuple[Namespace, list[Buffer]]:
    """The options, and the buffers to plan."""
    if not any(argument.partition("=")[0] == "--arch" for argument in arguments):
        given = parser().parse_args(arguments)
        _check_outputs(given)
        return given, read_buffers(given.file, alignment=given.align)
    given, training = parser(of_file=False).parse_known_args(arguments)
    _check_outputs(given)
    parsed = parse_step("lsq plan", given.arch, training)
    from lsq.commands import device  # takes seconds, and a file needs none of it
    from lsq.fairseq.memory import describe_training

    backend = device.planned(parsed)
    parsed.lsq_device = parsed.lsq_activations = None  # it need not be here
    print(
        f"planned for  {backend.name}, activations in"
        f" {str(backend.activations).removeprefix('torch.')}"
    )
    step = describe_training(parsed, given.vocabulary_size, backend)
    return given, list(step.buffers.values())


def parse_step(program: str, architecture: str, arguments: Sequence[str]) -> Namespace:
    """fairseq's options of a training step that needs no data, from `arguments` for a command of
    lsq.

    Exits as argparse does after a mistake.

    Raises:
        ValueError: the architecture is not of lsq, or a number is out of its range.
    """
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
    """The subcommand.

    Raises:
        ValueError, OSError: a mistake in the options or the file.
        LibraryError: exact is asked for, and the C++ host library is not built.
    """
    given, buffers = _buffers(arguments)
    with _progress(given) as progress:
        result = plan(
            buffers,
            method=given.method,
            capacity=given.capacity,
            time_limit=given.time_limit,
            progress=progress,
        )
    print(report(buffers, result))
    if given.output is not None:
        write = save_plan if given.output.suffix == ".json" else write_plan
        write(result, given.output)
    if given.plot is not None:
        draw(buffers, result, given.plot)
    return 0
