"""`lsq tune`: find the fastest way to run each matrix product on this GPU; keep it in a file."""

import contextlib
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from tqdm import tqdm

from lsq import extras
from lsq.commands.options import Count, File, Seconds, check_writable, command_parser
from lsq.commands.plan import parse_step
from lsq.gemm import configuration_file
from lsq.gemm.configuration import Entry, TileConfiguration
from lsq.gemm.configuration_file import ConfigurationFile
from lsq.gemm.cublaslt import first_candidate
from lsq.gemm.operations import TILED, TILED_ALONE
from lsq.gemm.product_key import MATMUL, TOKEN_STEP, ProductKey
from lsq.gemm.tuner import product_list
from lsq.gemm.tuner.cublaslt import CublasBackend
from lsq.gemm.tuner.search import Summary, opened, tune
from lsq.gemm.tuner.trial import Outcome, Trials
from lsq.ops.representatives import OPERATIONS
from lsq.run.cuda import gpu

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 16
"""Numbers of tokens up to --max-tokens, unless --step is given."""
LISTED = 5
MARKERS = "osD^vP"
BACKWARD = {"both": ("float", "int8"), "float": ("float",), "int8": ("int8",)}
NOT_ON_CPUS = (
    "lsq tune is for GPUs: on a CPU nothing is tuned, because lsq's own tiles run every product by"
    " a rule"
)


class What(Namespace):
    """what to tune (one of these)"""

    arch: Annotated[str, "NAME"] | None = None
    """the products of training and generation with this architecture"""
    shapes: File | None = None
    """a list as --list prints it, or as a training writes it with --lsq-gemm-coverage: CSV with op,
    m, n, k"""


class Training(Namespace):
    """with --arch; further options of fairseq-train may follow"""

    max_tokens: Count = 4096
    """of a batch"""
    step: Count | None = None
    """tokens from one batch size to the next"""
    backward: Annotated[str, tuple(BACKWARD)] = "both"
    """--lsq-backward of the training"""
    vocabulary_size: Count = 32000
    """joined vocabulary"""
    beam: Count = 5
    """of generation"""
    sentences: Count = 64
    """translated at a time"""


class Options(What, Training):
    """Try the ways to run each matrix product on this GPU, and write the fastest into a file that
    trainings and translations here use by themselves. Every way is checked against exact arithmetic
    first. Stop it whenever you like: the file has all finished products, and the same command goes
    on with the rest. Products of CPUs are not tuned: they run by a rule."""

    device: Annotated[str, ("cpu", "cuda")] = "cuda"
    """cuda alone"""
    output: Annotated[Path, "FILE.json"] | None = None
    """by default in the user's folder"""
    seconds: Seconds | None = None
    """begin no further product after so many"""
    again: bool = False
    """tune also what the file has already"""
    list: bool = False
    """print the products as CSV, and tune nothing; needs no GPU"""
    plot: File | None = None
    """draw what the file holds (.png, .svg, .pdf)"""
    quiet: bool = False
    """no progress bar"""


def parser() -> ArgumentParser:
    """Make the parser of `lsq tune`, up to fairseq's options."""
    return command_parser("tune", Options)


def run(arguments: list[str]) -> int:
    """Tune, report and draw; the exit status is 130 after Ctrl-C, 1 if a product could not be
    tuned.

    Raises:
        ValueError, OSError: a mistake in the options or the files, another tuner is at work, or
            there is no GPU or no libcublasLt.
    """
    options = parser()
    given, training = options.parse_known_args(arguments)
    if training and given.arch is None:
        options.error(f"unrecognized arguments: {' '.join(training)}")
    if not (given.arch or given.shapes or given.plot) or given.arch and given.shapes:
        options.error("say what to tune: --arch NAME or --shapes FILE")
    if given.device == "cpu":
        raise ValueError(f"--device is cpu, and {NOT_ON_CPUS}")
    for option, file in (("--output", given.output), ("--plot", given.plot)):
        if file is not None and not given.list:
            check_writable(file, option, makes_folders=option == "--output")
    keys = products(given, training)
    if given.list:
        print(product_list.text(keys), end="")
        return 0
    try:
        validators = configuration_file.here()
    except RuntimeError as error:
        raise ValueError(f"there is no GPU to tune for ({error}); {NOT_ON_CPUS}") from None
    path = given.output or _default_path(configuration_file.file_name(validators))
    if given.output is None:
        check_writable(path, makes_folders=True)
    status = 0
    if given.arch or given.shapes:
        known = () if given.again else {entry.key for entry in opened(path, validators).entries}
        due = sum(key not in known for key in keys)
        if due:
            print(f"to tune    {due} products", flush=True)
        with _progress(due, given.quiet) as progress:
            summary = tune(
                gpu_trials(),
                keys,
                path,
                validators,
                again=given.again,
                seconds=given.seconds or math.inf,
                progress=progress,
            )
        print(report(summary))
        status = 130 if summary.interrupted else 1 if summary.failed else 0
    if given.plot is not None:
        draw(configuration_file.read(path), given.plot)
    return status


def products(given: Namespace, training: Sequence[str]) -> list[ProductKey]:
    """Return the products to tune."""
    keys: list[ProductKey] = []
    if given.arch is not None:
        keys = _of_training(given, training)
    elif given.shapes is not None:
        keys = product_list.read(given.shapes)
    return list(dict.fromkeys(key.rounded() for key in keys))


def _of_training(given: Namespace, training: Sequence[str]) -> list[ProductKey]:
    step = given.step or -(-given.max_tokens // (STEPS * TOKEN_STEP)) * TOKEN_STEP
    # takes seconds
    from lsq.fairseq.products import generation_rows, products_of_training, token_counts

    return products_of_training(
        parse_step("lsq tune", given.arch, ["--max-tokens", str(given.max_tokens), *training]),
        given.vocabulary_size,
        backward=BACKWARD[given.backward],
        tokens=token_counts(given.max_tokens, step),
        rows=generation_rows(given.beam, given.sentences),
    )


def gpu_trials(*, cache: int | None = None) -> Trials:
    """Make trials of products on the current GPU.

    Args:
        cache: bytes that the operands of a product exceed together; None: the L2 cache.

    Raises:
        RuntimeError, ValueError: there is no libcublasLt, or the GPU cannot be used.
    """
    current = gpu(torch.cuda.current_device(), first_candidate)
    return CublasBackend(current.products, device=current, operations=OPERATIONS, cache=cache).trial


def _default_path(name: str) -> Path:
    folder = configuration_file.user_folder()
    if folder is None:
        raise ValueError("there is no home folder to write to; give --output FILE.json")
    return folder / name


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[ProductKey, Outcome | None], None]]:
    """Within this context, the `progress` of `lsq.gemm.tuner.search.tune`."""
    gains = []
    with tqdm(total=total, desc="tuning", disable=quiet or None, file=sys.stderr) as bar:

        def progress(key: ProductKey, outcome: Outcome | None) -> None:
            if outcome is not None:
                gains.append(outcome.default / outcome.chosen)
                gain = statistics.geometric_mean(gains)
                bar.set_postfix_str(f"{gain:.3f} times as fast", refresh=False)
            bar.update()

        yield progress


def report(summary: Summary) -> str:
    """Format the results of a run."""
    entries = summary.entries
    lines = [f"file       {summary.path}", f"tuned      {len(entries)} products"]
    if entries:
        gains = [entry.gain for entry in entries]
        floats = [entry.times.float / entry.times.chosen for entry in entries]
        changed = sum(entry.times.chosen != entry.times.default for entry in entries)
        lines += [
            f"faster     {changed} of them",
            f"           {statistics.geometric_mean(gains):.3f} times as fast as untuned on"
            f" average, {max(gains):.2f} at best",
            f"           {statistics.geometric_mean(floats):.1f} times as fast as floats on"
            " average",
        ]
    compared = [entry for entry in entries if entry.times.other is not None]
    if compared:
        tiled = sum(isinstance(entry.configuration, TileConfiguration) for entry in compared)
        average = statistics.geometric_mean(
            entry.times.other / entry.times.chosen for entry in compared
        )
        lines += [
            f"in one     {tiled} of {len(compared)}: one kernel multiplies and ends; the others by"
            " cuBLASLt",
            f"           {average:.3f} times as fast as the other way on average",
        ]
    counts = [
        (summary.skipped, "had an entry already; --again tunes them, too"),
        (summary.left, "were not reached; the same command goes on with them"),
        (summary.incomplete, "had no time for every candidate; --again takes them up once more"),
        (summary.refused, "candidates were refused: wrong results, or they do not run"),
    ]
    lines += [f"           {count} {text}" for count, text in counts if count]
    lines += [f"failed     {key}: {reason}" for key, reason in summary.failed[:LISTED]]
    more = len(summary.failed) - LISTED
    lines += [f"           and {more} more"] if more > 0 else []
    lines += ["stopped    by Ctrl-C; what is done is in the file"] if summary.interrupted else []
    return "\n".join(lines)


def draw(file: ConfigurationFile, path: Path) -> None:
    """Draw the speed-up of each product over the default, and over the product of floats; the
    suffix of `path` chooses the format. ValueError if the file has no entries, or the format is
    unknown."""
    if not file.entries:
        raise ValueError("the file has no entries; there is nothing to draw")
    extras.require("a picture", "study")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _panel(above, file.entries, lambda entry: entry.gain, "as run untuned")
    _panel(
        below,
        file.entries,
        lambda entry: entry.times.float / entry.times.chosen,
        "as the product of floats",
    )
    below.set_xlabel("multiplications and additions of the product")
    validators = file.validators
    figure.suptitle(
        f"{validators.device}, {validators.library} {validators.library_version}:"
        f" {len(file.entries)} products"
    )
    figure.savefig(path, dpi=150)


def _panel(
    axes: "Axes", entries: Sequence[Entry], gain: Callable[[Entry], float], compared: str
) -> None:
    for number, op in enumerate((*TILED, *TILED_ALONE, MATMUL)):
        chosen = [entry for entry in entries if entry.key.op == op]
        if not chosen:
            continue
        gains = [gain(entry) for entry in chosen]
        axes.plot(
            [entry.key.arithmetic for entry in chosen],
            gains,
            MARKERS[number],
            color=f"C{number}",
            alpha=0.7,
            markersize=5,
            markeredgewidth=0,
            label=f"{op}: {statistics.geometric_mean(gains):.2f} on average",
        )
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    lowest, highest = axes.get_ylim()
    if highest / lowest < 5:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"times as fast {compared}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
