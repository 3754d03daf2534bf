"""`lsq tune`: find the fastest way to run each matrix product on this GPU; keep it in a file."""

import contextlib
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from tqdm import tqdm

from lsq.commands import tune_registers
from lsq.commands.options import Count, File, Seconds, check_writable, command_parser
from lsq.commands.plan import parse_step
from lsq.gemm import configuration_file
from lsq.gemm.configuration import TileConfiguration
from lsq.gemm.cublaslt import first_candidate
from lsq.gemm.product_key import TOKEN_STEP, ProductKey
from lsq.gemm.tuner import product_list
from lsq.gemm.tuner.cublaslt import CublasBackend
from lsq.gemm.tuner.search import Summary, opened, tune
from lsq.gemm.tuner.trial import Outcome, Trials
from lsq.ops.representatives import OPERATIONS
from lsq.run.cuda import gpu

STEPS = 16
LISTED = 5
BACKWARD = {"both": ("float", "int8"), "float": ("float",), "int8": ("int8",)}
OF_CPUS = (
    "on a CPU, `lsq tune --device cpu` measures stored types; lsq's own tiles run all other"
    " products by a rule"
)


class What(Namespace):
    """what to tune (one of these)"""

    arch: Annotated[str, "NAME"] | None = None
    """the products of training and generation with this architecture"""
    shapes: File | None = None
    """a list of --list, or of a training with --lsq-gemm-coverage: CSV with op, m, n, k"""


class Training(Namespace):
    """with --arch; further options of fairseq-train may follow"""

    max_tokens: Count = 4096
    """tokens of a batch"""
    step: Count | None = None
    """tokens from one batch size to the next"""
    backward: Annotated[str, tuple(BACKWARD)] = "both"
    """--lsq-backward of the training"""
    vocabulary_size: Count = 32000
    """words of the joined vocabulary"""
    beam: Count = 5
    """beam of generation"""
    sentences: Count = 64
    """sentences that are translated at a time"""


class Options(What, Training):
    """Try the ways to run each matrix product on this GPU, and write the fastest into a file that
    trainings and translations here use by themselves. Every way is checked against exact arithmetic
    first. Stop it whenever you like: the file has all finished products, and the same command goes
    on with the rest. On a CPU (--device cpu) it measures in a minute for which rows weights of 1 to
    8 bits are multiplied in registers, and writes when it has finished; all other products run by a
    rule."""

    device: Annotated[str, ("cpu", "cuda")] = "cuda"
    """cpu takes no other option but --quiet"""
    output: Annotated[Path, "FILE.json"] | None = None
    """file to write (default: a file in the user's folder)"""
    seconds: Seconds | None = None
    """begin no further product after so many seconds"""
    again: bool = False
    """tune also what the file has already"""
    list: bool = False
    """print the products as CSV, and tune nothing; needs no GPU"""
    quiet: bool = False
    """no progress bar"""


def parser() -> ArgumentParser:
    return command_parser("tune", Options)


def run(arguments: list[str]) -> int:
    """Tune and report; exit status 130 after Ctrl-C, 1 after a failure; ValueError, OSError."""
    options = parser()
    given, training = options.parse_known_args(arguments)
    if training and given.arch is None:
        options.error(f"unrecognized arguments: {' '.join(training)}")
    if given.device == "cpu":
        _refuse_for_cpu(given)
        return tune_registers.run(given.quiet)
    if bool(given.arch) == bool(given.shapes):
        options.error("say what to tune: --arch NAME or --shapes FILE")
    if given.output is not None and not given.list:
        check_writable(given.output, makes_folders=True)
    keys = products(given, training)
    if given.list:
        print(product_list.text(keys), end="")
        return 0
    try:
        validators = configuration_file.here()
    except RuntimeError as error:
        raise ValueError(f"there is no GPU to tune for ({error}); {OF_CPUS}") from None
    path = given.output or _default_path(configuration_file.file_name(validators))
    if given.output is None:
        check_writable(path, makes_folders=True)
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
    return 130 if summary.interrupted else 1 if summary.failed else 0


def _refuse_for_cpu(given: Namespace) -> None:
    """Raise ValueError for options that are for GPUs alone."""
    defaults = Options()
    for name in ("arch", "shapes", "output", "seconds", "again", "list"):
        if getattr(given, name) != getattr(defaults, name):
            raise ValueError(f"--{name} is for GPUs; with --device cpu leave it out")


def products(given: Namespace, training: Sequence[str]) -> list[ProductKey]:
    of_training = given.arch is not None
    keys = _of_training(given, training) if of_training else product_list.read(given.shapes)
    return list(dict.fromkeys(key.rounded() for key in keys))


def _of_training(given: Namespace, training: Sequence[str]) -> list[ProductKey]:
    step = given.step or -(-given.max_tokens // (STEPS * TOKEN_STEP)) * TOKEN_STEP
    # takes seconds: it imports fairseq
    from lsq.fairseq.products import generation_rows, products_of_training, token_counts

    return products_of_training(
        parse_step("lsq tune", given.arch, ["--max-tokens", str(given.max_tokens), *training]),
        given.vocabulary_size,
        backward=BACKWARD[given.backward],
        tokens=token_counts(given.max_tokens, step),
        rows=generation_rows(given.beam, given.sentences),
    )


def gpu_trials(*, cache: int | None = None) -> Trials:
    """Return trials of products on this GPU; operands exceed `cache` bytes (None: the L2 cache)."""
    current = gpu(torch.cuda.current_device(), first_candidate)
    return CublasBackend(current.products, device=current, operations=OPERATIONS, cache=cache).trial


def _default_path(name: str) -> Path:
    folder = configuration_file.user_folder()
    if folder is None:
        raise ValueError("there is no home folder to write to; give --output FILE.json")
    return folder / name


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[ProductKey, Outcome | None], None]]:
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
        ratios = [entry.times.other / entry.times.chosen for entry in compared]
        average = statistics.geometric_mean(ratios)
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
