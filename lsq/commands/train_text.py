"""`lsq train-text`: from two text files to a trained and scored translator, resumable."""

import argparse
import math
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Annotated

from lsq.commands import text_run
from lsq.commands.launch import (
    ARCHITECTURE,
    DEVICE_OPTIONS,
    add_device_options,
    choose_device,
    device_options,
)
from lsq.commands.options import File, Folder, Positive, check_writable, command_parser, is_given
from lsq.commands.prepare import Prepared, prepare, say
from lsq.commands.text_run import FIXED, OF_THIS_COMMAND, RunOptions, named_options
from lsq.commands.train import CRITERION, TASK
from lsq.commands.user_code import UserCode
from lsq.config import MODES
from lsq.fairseq import architectures
from lsq.fairseq import options as quantizer_options
from lsq.files.lock import locked_folder
from lsq.text.corpus import check_file
from lsq.text.score import TOKENIZERS

EPILOG = """
Options after a lone -- go to `lsq train` as they are, e.g. `-- --encoder-normalize-before`. Several
runs share one output folder under different --name; the text, vocabulary and data are then made
once. Without files to validate or to test with, pairs are held out of the training text (one in
twenty, at most 2,000).
"""


class TextOptions(Namespace):
    """text"""

    src: File
    """source sentences, one a line"""
    tgt: File
    """their translations"""
    valid_src: File | None = None
    """source sentences to choose the best checkpoint by; without it, pairs are held out"""
    valid_tgt: File | None = None
    """their translations"""
    test_src: File | None = None
    """source sentences to translate and score; without it, pairs are held out"""
    test_tgt: File | None = None
    """their translations"""
    output: Folder
    """where everything is written"""
    prepare_only: bool = False
    """make the data for `lsq train`, and stop"""


class VocabularyOptions(Namespace):
    """vocabulary"""

    vocabulary_size: Positive = 8000
    """number of subwords"""
    character_coverage: float = 0.9995
    """share of the characters that have a piece"""
    max_length: Positive = 256
    """longest sentence in pieces; longer pairs are left out, longer translations end there"""


class Sizes(Namespace):
    """sizes of the model"""

    layers: Positive = 3
    """layers of the encoder, and of the decoder"""
    hidden: Positive = 256
    """hidden size"""
    feed_forward: Positive = 1024
    """inner size of feed-forward blocks"""
    heads: Positive = 4
    """attention heads"""


class TrainingOptions(Namespace):
    """training"""

    mode: Annotated[str, MODES] = "int8"
    """int8: lsq's layers; float: fairseq's own"""
    arch: str | None = None
    """fairseq architecture (default: lsq_transformer for int8, transformer for float)"""
    name: str | None = None
    """name of this run, a folder in --output (default: the mode)"""
    updates: Positive = 10000
    """updates of the weights"""
    dropout: float = 0.1
    """dropout"""
    max_tokens: Positive = 4096
    """tokens in a batch, with padding"""
    update_freq: Positive = 1
    """batches in an update"""
    lr: float = 1e-3
    """highest learning rate"""
    warmup: Positive = 1000
    """updates until the highest learning rate"""
    label_smoothing: float = 0.1
    """label smoothing"""
    clip_norm: float = 1.0
    """largest norm of the gradient"""
    validate_every: Positive = 500
    """updates between validations, each with a checkpoint"""
    log_every: Positive = 50
    """updates between points of the loss curve"""
    seed: int = 1
    """seed of weights, order of batches and dropout"""
    cpu: bool = False
    """use no GPU"""
    beam: Positive = 5
    """beam size of the translation"""
    bleu_tokenizer: Annotated[str, TOKENIZERS] = "13a"
    """what BLEU counts as words (sacrebleu's names)"""
    overwrite: bool = False
    """delete an earlier run of this name if it differs; what it did not make stays"""
    quiet: bool = False
    """no progress bars"""


class Options(TextOptions, VocabularyOptions, Sizes, TrainingOptions, UserCode):
    """Train a translator on your own text: learn a shared vocabulary (sentencepiece), binarise,
    train, translate the test set and score it (BLEU, chrF). Line i of one file is the translation
    of line i of the other. Run the same command again to continue after an interruption; finished
    stages are skipped."""


def parser() -> ArgumentParser:
    made = command_parser("train-text", Options, epilog=EPILOG)
    add_device_options(made)
    quantizers = made.add_argument_group(
        "quantisers, with --mode int8", argument_default=argparse.SUPPRESS
    )
    quantizer_options.add_arguments(quantizers, without=("mode",))
    return made


def check_output(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file; give a folder")
    check_writable(folder, makes_folders=True)
    if str(folder).startswith("-") or os.pathsep in str(folder) or "${" in str(folder):
        raise ValueError(
            f"--output {folder} has a name that fairseq takes for options or several folders;"
            f" choose one that does not begin with - and is without {os.pathsep} and ${{"
        )


def file_pair(given: Namespace, split: str) -> tuple[Path, Path] | None:
    source, target = getattr(given, f"{split}_src"), getattr(given, f"{split}_tgt")
    if (source is None) != (target is None):
        raise ValueError(f"--{split}-src and --{split}-tgt go together; only one of them is given")
    return None if source is None else (source, target)


def run_options(given: Namespace, extra: list[str]) -> RunOptions:
    """Make the options of a run; ValueError if they contradict each other."""
    names = [
        name
        for name in vars(given)
        if name.startswith(quantizer_options.PREFIX) and name not in DEVICE_OPTIONS
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
            f" {given.max_length} pieces and their end mark; use at least {given.max_length + 1}"
        )
    choose_device(given, ours)
    training = {
        "--arch": architecture,
        "--task": TASK if ours else "translation",
        "--criterion": CRITERION if ours else "label_smoothed_cross_entropy",
        "--seed": str(given.seed),
        **FIXED,
        **text_run.set_by(given),
    }
    if given.cpu:
        training["--cpu"] = None
    if ours:
        training |= {"--lsq-mode": given.mode, **quantizers, **device_options(given)}
    given.name = given.mode if given.name is None else text_run.check_name(given.name)
    return RunOptions(given=given, training=training, extra=extra)


def parsed(arguments: list[str]) -> tuple[Prepared, RunOptions]:
    """Return the data and the run that a command line asks for; ValueError or OSError."""
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
    check_small_text(given, arguments)
    prepared = Prepared(
        files=files,
        output=given.output,
        size=given.vocabulary_size,
        coverage=given.character_coverage,
        max_length=given.max_length,
    )
    return prepared, options


def run(arguments: list[str]) -> int:
    """Prepare, train, translate and score; ValueError, OSError or Interrupted."""
    prepared, options = parsed(arguments)
    given = options.given
    if given.prepare_only:
        text_run.check_data(prepared)
        with locked_folder(given.output, "choose another --output"):
            text_run.check_data(prepared)
            prepare(prepared)
        say(f"The data are in {prepared.data}; the vocabulary is {prepared.vocabulary}")
        return 0
    results = text_run.run(prepared, options)
    say(f"BLEU {results['bleu']:.2f}  ({results['bleu_signature']})")
    say(f"chrF {results['chrf']:.2f}  ({results['chrf_signature']})")
    say(
        f"{results['updates']} updates in {results['training_seconds']:.0f} s; everything is in"
        f" {given.output / given.name}:"
    )
    say("results.json, losses.png, translation/hypotheses.txt, model/checkpoint_best.pt")
    return 0


# Numbers for a text that is too small for the defaults

CHARACTERS = 50
"""Fewest characters of text for each piece of a vocabulary: rarer pieces are hardly learnt."""
MORE_THAN_LETTERS = 100
"""Pieces of a vocabulary beyond its single characters."""
CHARACTERS_OF_A_TOKEN = 3
PASSES = 200
"""Passes over the text in a training."""
LEAST_UPDATES = 1000
LARGE = 2**23
"""Bytes of a text that is large enough for the defaults."""


def check_small_text(given: Namespace, words: list[str]) -> None:
    """Raise ValueError, naming what fits, if a default is more than twice what fits the text."""
    for path in (given.src, given.tgt):
        check_file(path)
    wanted = ["--vocabulary-size"] if given.prepare_only else ["--vocabulary-size", "--updates"]
    missing = [option for option in wanted if not is_given(option, words)]
    if not missing or given.src.stat().st_size + given.tgt.stat().st_size > LARGE:
        return
    sides = [path.read_text(encoding="utf-8", errors="replace") for path in (given.src, given.tgt)]
    characters, letters = sum(map(len, sides)), len(set().union(*sides))
    most = letters + len(set().union(*map(str.split, sides)))
    pieces = min(max(characters // CHARACTERS, letters + MORE_THAN_LETTERS), most)
    tokens = max(map(len, sides)) / CHARACTERS_OF_A_TOKEN
    updates_of_a_pass = max(1, math.ceil(tokens / (given.max_tokens * given.update_freq)))
    updates = _two_digits(max(LEAST_UPDATES, PASSES * updates_of_a_pass))
    fitting = {"--vocabulary-size": _two_digits(pieces), "--updates": updates}
    defaults = {"--vocabulary-size": given.vocabulary_size, "--updates": given.updates}
    refused = [option for option in missing if 2 * fitting[option] < defaults[option]]
    if not refused:
        return
    advice = {option: fitting[option] for option in refused}
    if "--updates" in refused:
        others = [o for o in ("--warmup", "--validate-every") if not is_given(o, words)]
        advice |= dict.fromkeys(others, updates // 10)
    raise ValueError(
        f"the text is small ({sides[0].count(chr(10))} lines, {characters} characters on both"
        f" sides) for the default {' and '.join(f'{o} {defaults[o]}' for o in refused)}; give"
        f" {' '.join(f'{o} {number}' for o, number in advice.items())}, or numbers of your own"
    )


def _two_digits(number: int) -> int:
    unit = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit
