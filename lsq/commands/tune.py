"""`lsq tune`: find the fastest way to run each matrix product on this GPU; keep it in a file."""

import contextlib
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from lsq.commands.options import check_writable, command_parser, count, seconds
from lsq.commands.plan import parse_step
from lsq.commands.tune_picture import draw
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
"""Numbers of tokens up to --max-tokens, unless --step is given."""
LISTED = 5
BACKWARD = {"both": ("float", "int8"), "float": ("float",), "int8": ("int8",)}
NOT_ON_CPUS = (
    "lsq tune is for GPUs: on a CPU nothing is tuned, because lsq's own tiles run every product by"
    " a rule"
)


def parser() -> ArgumentParser:
    """The command line of `lsq tune`, up to fairseq's options."""
    result = command_parser(
        "tune",
        "Try the ways to run each matrix product on this GPU, and write the fastest into a file"
        " that trainings and translations here use by themselves. Every way is checked against"
        " exact arithmetic first. Stop it whenever you like: the file has all finished"
        " products, and the same command goes on with the rest. Products of CPUs are not tuned:"
        " they run by a rule.",
    )
    what = result.add_argument_group("what to tune (one of these)").add_mutually_exclusive_group()
    what.add_argument(
        "--arch",
        metavar="NAME",
        help="the products of training and generation with this architecture",
    )
    what.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="a list as --list prints it, or as a training writes it with --lsq-gemm-coverage: CSV"
        " with op, m, n, k",
    )
    training = result.add_argument_group("with --arch; further options of fairseq-train may follow")
    training.add_argument("--max-tokens", type=count, default=4096, metavar="N", help="of a batch")
    training.add_argument(
        "--step", type=count, metavar="N", help="tokens from one batch size to the next"
    )
    training.add_argument(
        "--backward", choices=BACKWARD, default="both", help="--lsq-backward of the training"
    )
    training.add_argument(
        "--vocabulary-size", type=count, default=32000, metavar="N", help="joined vocabulary"
    )
    training.add_argument("--beam", type=count, default=5, metavar="N", help="of generation")
    training.add_argument(
        "--sentences", type=count, default=64, metavar="N", help="translated at a time"
    )
    result.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda alone")
    result.add_argument(
        "--output", type=Path, metavar="FILE.json", help="by default in the user's folder"
    )
    result.add_argument(
        "--seconds", type=seconds, metavar="S", help="begin no further product after so many"
    )
    result.add_argument("--again", action="store_true", help="tune also what the file has already")
    result.add_argument(
        "--list",
        action="store_true",
        help="print the products as CSV, and tune nothing; needs no GPU",
    )
    result.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what the file holds (.png, .svg, .pdf)"
    )
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    return result


def run(arguments: list[str]) -> int:
    """The subcommand; the exit status: 130 after Ctrl-C, 1 if a product could not be tuned, else 0.

    Raises:
        ValueError, OSError: a mistake in the options or the files, another tuner is at work, or
            there is no GPU or no libcublasLt.
    """
    given, training = parser().parse_known_args(arguments)
    if training and given.arch is None:
        parser().error(f"unrecognized arguments: {' '.join(training)}")
    if not (given.arch or given.shapes or given.plot):
        parser().error("say what to tune: --arch NAME or --shapes FILE")
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
    """The products to tune.

    Raises:
        ValueError, OSError: a mistake in the options or the files.
    """
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
    """Trials of products on the current GPU.

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
    """The results of a run, for people."""
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
