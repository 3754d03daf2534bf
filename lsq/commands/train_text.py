"""`lsq train-text`: from two plain text files to a trained translator and its scores, in one
resumable command."""

import argparse
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lsq.commands import device, small_text, training_options
from lsq.commands.options import check_writable, command_parser, positive
from lsq.commands.prepare import Prepared, prepare, say
from lsq.commands.run_folder import check_data, check_name
from lsq.commands.text_run import RunOptions
from lsq.commands.text_run import run as run_training
from lsq.commands.train import ARCHITECTURE, CRITERION, TASK
from lsq.commands.training_options import OF_THIS_COMMAND, named_options
from lsq.config import MODES
from lsq.fairseq import architectures
from lsq.fairseq import options as quantizer_options
from lsq.files.lock import locked_folder
from lsq.text.score import TOKENIZERS

DESCRIPTION = """
Train a translator on your own text: learn a shared vocabulary (sentencepiece), binarise, train,
translate the test set and score it (BLEU, chrF). Line i of one file is the translation of line i of
the other. Run the same command again to continue after an interruption; finished stages are
skipped.
"""
EPILOG = """
Options after a lone -- go to `lsq train` as they are, e.g. `-- --encoder-normalize-before`. Several
runs share one output folder under different --name; the text, vocabulary and data are then made
once.
"""


def parser() -> ArgumentParser:
    """The command line of `lsq train-text`."""
    made = command_parser("train-text", DESCRIPTION, epilog=EPILOG)
    files = made.add_argument_group("text")
    files.add_argument(
        "--src", type=Path, required=True, metavar="FILE", help="source sentences, one a line"
    )
    files.add_argument("--tgt", type=Path, required=True, metavar="FILE", help="their translations")
    held_out = (
        "; without it, pairs are held out of the training text (one in twenty, at most 2,000)"
    )
    for split, purpose in (
        ("valid", "to choose the best checkpoint by"),
        ("test", "to translate and score"),
    ):
        for side in ("src", "tgt"):
            help_text = f"{'source' if side == 'src' else 'target'} sentences {purpose}{held_out}"
            files.add_argument(f"--{split}-{side}", type=Path, metavar="FILE", help=help_text)
    files.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where everything is written"
    )
    files.add_argument(
        "--prepare-only", action="store_true", help="make the data for `lsq train`, and stop"
    )
    vocabulary = made.add_argument_group("vocabulary")
    vocabulary.add_argument(
        "--vocabulary-size", type=positive, default=8000, help="number of subwords"
    )
    vocabulary.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        help="share of the characters that have a piece",
    )
    vocabulary.add_argument(
        "--max-length",
        type=positive,
        default=256,
        help="longest sentence in pieces; longer pairs are left out, longer translations end there",
    )
    model = made.add_argument_group("model")
    model.add_argument(
        "--mode", choices=MODES, default="int8", help="int8: lsq's layers; float: fairseq's own"
    )
    model.add_argument(
        "--arch",
        help=f"fairseq architecture (default: {ARCHITECTURE} for int8, transformer for float)",
    )
    training_options.add(model, training_options.MODEL)
    training = made.add_argument_group("training")
    training.add_argument(
        "--name", help="name of this run, a folder in --output (default: the mode)"
    )
    training.add_argument("--updates", type=positive, default=10000, help="updates of the weights")
    training_options.add(training, training_options.TRAINING)
    training.add_argument(
        "--seed", type=int, default=1, help="seed of weights, order of batches and dropout"
    )
    training.add_argument("--cpu", action="store_true", help="use no GPU")
    device.add_options(training)
    training.add_argument("--beam", type=positive, default=5, help="beam size of the translation")
    training.add_argument(
        "--bleu-tokenizer",
        choices=TOKENIZERS,
        default="13a",
        help="what BLEU counts as words (sacrebleu's names)",
    )
    training.add_argument(
        "--overwrite",
        action="store_true",
        help="delete an earlier run of this name if it differs; what it did not make stays",
    )
    training.add_argument("--quiet", action="store_true", help="no progress bars")
    quantizers = made.add_argument_group(
        "quantisers, with --mode int8", argument_default=argparse.SUPPRESS
    )
    quantizer_options.add_arguments(quantizers, without=("mode",))
    return made


def check_output(folder: Path) -> None:
    """Refuse folders that cannot be written, or that fairseq takes for something else.

    Raises:
        ValueError: it is a file, this user may not write there, it begins with -, or has a colon or
            ${ in its name.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; give a folder")
    check_writable(folder, makes_folders=True)
    if str(folder).startswith("-") or os.pathsep in str(folder) or "${" in str(folder):
        raise ValueError(
            f"--output {folder} has a name that fairseq takes for options or several folders;"
            " choose one that does not"
            f" begin with - and is without {os.pathsep} and ${{"
        )


def file_pair(given: Namespace, split: str) -> tuple[Path, Path] | None:
    """The two files of a split, or None where neither is given.

    Raises:
        ValueError: one is given without the other.
    """
    source, target = getattr(given, f"{split}_src"), getattr(given, f"{split}_tgt")
    if (source is None) != (target is None):
        raise ValueError(f"--{split}-src and --{split}-tgt go together; only one of them is given")
    return None if source is None else (source, target)


def run_options(given: Namespace, extra: list[str]) -> RunOptions:
    """What to train, from the options of `parser`.

    Raises:
        ValueError: options that contradict each other.
    """
    names = [
        name
        for name in vars(given)
        if name.startswith(quantizer_options.PREFIX) and name not in device.NAMES
    ]
    quantizers = {quantizer_options.option(name): str(getattr(given, name)) for name in names}
    architecture = given.arch or (ARCHITECTURE if given.mode == "int8" else "transformer")
    ours = architectures.is_ours(architecture)
    if not ours and (given.mode == "int8" or quantizers):
        raise ValueError(
            f"--arch {architecture} has no quantisers; with --mode int8 and --lsq-... options use"
            f" {ARCHITECTURE}"
        )
    for option in OF_THIS_COMMAND.keys() & named_options(extra).keys():
        raise ValueError(
            f"{option} after -- is set by lsq train-text itself; leave it out:"
            f" {OF_THIS_COMMAND[option]}"
        )
    if given.max_tokens <= given.max_length:
        raise ValueError(
            f"--max-tokens {given.max_tokens} is too small for sentences of --max-length"
            f" {given.max_length} pieces"
            f" and their end mark; use at least {given.max_length + 1}"
        )
    device.choose(given, ours)
    training = {
        "--arch": architecture,
        "--task": TASK if ours else "translation",
        "--criterion": CRITERION if ours else "label_smoothed_cross_entropy",
        "--seed": str(given.seed),
        **training_options.values(given),
    }
    if given.cpu:
        training["--cpu"] = None
    if ours:
        training |= {"--lsq-mode": given.mode, **quantizers, **device.asked(given)}
    given.name = given.mode if given.name is None else check_name(given.name)
    return RunOptions(given=given, training=training, extra=extra)


def parsed(arguments: list[str]) -> tuple[Prepared, RunOptions]:
    """The data and the run that a command line asks for.

    Raises:
        ValueError, OSError: a mistake in the options or the files.
    """
    extra = []
    if "--" in arguments:
        middle = arguments.index("--")
        arguments, extra = arguments[:middle], arguments[middle + 1 :]
    given = parser().parse_args(arguments)
    check_output(given.output)
    files = {
        "train": (given.src, given.tgt),
        "valid": file_pair(given, "valid"),
        "test": file_pair(given, "test"),
    }
    options = run_options(given, extra)
    small_text.check(given, arguments)
    prepared = Prepared(
        files=files,
        output=given.output,
        size=given.vocabulary_size,
        coverage=given.character_coverage,
        max_length=given.max_length,
    )
    return prepared, options


def run(arguments: list[str]) -> int:
    """The subcommand.

    Raises:
        ValueError, OSError: a mistake in the options or the files.
        Interrupted: a signal came.
    """
    prepared, options = parsed(arguments)
    given = options.given
    if given.prepare_only:
        check_data(prepared)
        with locked_folder(given.output, "choose another --output"):
            check_data(prepared)
            prepare(prepared)
        say(f"The data are in {prepared.data}; the vocabulary is {prepared.vocabulary}")
        return 0
    results = run_training(prepared, options)
    folder = given.output / given.name
    say(f"BLEU {results['bleu']:.2f}  ({results['bleu_signature']})")
    say(f"chrF {results['chrf']:.2f}  ({results['chrf_signature']})")
    say(
        f"{results['updates']} updates in {results['training_seconds']:.0f} s; everything is in"
        f" {folder}:"
    )
    say("results.json, losses.png, translation/hypotheses.txt, model/checkpoint_best.pt")
    return 0
