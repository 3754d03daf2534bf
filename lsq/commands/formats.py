"""`lsq formats`: what number formats cost the tensors of a model."""

import json
from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lsq import files
from lsq.commands import interruption, logs, run_files
from lsq.commands.options import HelpFormatter, count, one_line_errors, replaces
from lsq.files.lock import locked_folder
from lsq.quant.numbers import METHODS
from lsq.quant.numbers.clips import PERCENTILE
from lsq.study import DEFAULT_FORMATS, Errors, draw, measure, measure_tensors
from lsq.study.tensors import LARGEST_SAMPLE

DESCRIPTION = """
Measure the error of number formats in real tensors: signal-to-noise in decibels (6 dB are a bit),
the largest error, and bits per value with scales counted. From a checkpoint: of its weights. From a
model and a batch of text: of its weights, of what its products read (activations), and of the
gradients of what they give.
"""
WORDS = 2048
"""Of the batch, where nothing is asked for."""
JSON, TABLE, PICTURE = OUTPUTS = ("formats.json", "formats.md", "formats.png")


def parser() -> ArgumentParser:
    """The command line of `lsq formats`."""
    made = ArgumentParser(
        prog="lsq formats",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    one_line_errors(made)
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a file of safetensors, PyTorch, fairseq or `lsq export`, a folder of transformers',"
        " or a run of `lsq "
        "train-text`: all float tensors with two dimensions or more",
    )
    what.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder of transformers' (with --text), a run of `lsq train-text`, or a checkpoint"
        " of fairseq's with "
        "--data: weights, activations and gradients of a batch",
    )
    made.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --model: sentences, one a line, and a second file of translations for a model"
        " that translates; "
        "without it, the validation data of the training",
    )
    made.add_argument(
        "--words",
        type=count,
        metavar="N",
        help=f"with --model: of the batch, about (default: {WORDS})",
    )
    made.add_argument(
        "--data", type=Path, metavar="DIR", help="of a checkpoint as --model: its data folder"
    )
    made.add_argument(
        "--sentencepiece-model",
        type=Path,
        metavar="FILE",
        help="of a checkpoint as --model, for --text",
    )
    made.add_argument(
        "--tensors",
        nargs="+",
        metavar="PATTERN",
        help="names of weights, with * and ?; others are left out",
    )
    made.add_argument(
        "--formats",
        nargs="+",
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help="such as nvfp4 or int4/group16/uint4, see docs/numbers.md",
    )
    made.add_argument("--clip", choices=METHODS, default="absmax", help="how clips are measured")
    made.add_argument(
        "--percentile",
        type=float,
        default=PERCENTILE,
        metavar="P",
        help="of --clip percentile: what is left inside",
    )
    made.add_argument(
        "--sample",
        type=count,
        default=LARGEST_SAMPLE,
        metavar="N",
        help="values that are looked at of a large tensor",
    )
    made.add_argument(
        "--output", type=Path, metavar="DIR", help=f"write {', '.join(OUTPUTS)} into this folder"
    )
    made.add_argument("--overwrite", action="store_true", help="replace these files")
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def run(arguments: list[str]) -> int:
    """The subcommand: measure, show, and write.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files; or nothing could be
            measured.
        OSError: the output cannot be written.
        Interrupted: SIGTERM or SIGHUP.
    """
    given = parser().parse_args(arguments)
    check(given)
    logs.quieten()
    with interruption.raised(), one_writer(given.output):
        errors, source = measured(given)
        print(errors)
        if not errors.kinds:
            raise ValueError(f"nothing could be measured in {source}: {errors.remarks()[0]}")
        if given.output is not None:
            write(errors, source, given.output)
            print(f"\n{', '.join(OUTPUTS)} are in {given.output}")
    return 0


def one_writer(folder: Path | None) -> AbstractContextManager[None]:
    """Let nobody else write into the folder meanwhile, so that its files are of one measurement."""
    return nullcontext() if folder is None else locked_folder(folder, "choose another --output")


def check(given: Namespace) -> None:
    """Refuse options that do not go together, and an output that may not be written.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: with what to do.
    """
    of_model = {
        "--text": given.text,
        "--words": given.words,
        "--data": given.data,
        "--sentencepiece-model": given.sentencepiece_model,
    }
    wrong = [option for option, value in of_model.items() if value]
    if given.checkpoint is not None and wrong:
        raise ValueError(
            f"{wrong[0]} goes with --model, by which a batch is computed; with --checkpoint leave"
            " it out"
        )
    for path in filter(None, (given.checkpoint, given.model, *(given.text or ()))):
        if not path.exists():
            raise FileNotFoundError(2, "is not there", str(path))
    if given.model is not None and given.model.is_file() and given.data is None:
        raise ValueError(
            f"--model {given.model} is a file; for its weights give --checkpoint {given.model}, or,"
            " if it is a "
            "checkpoint of fairseq's, the folder of its data, too, by which a batch is computed:"
            " --data"
        )
    if given.output is None or not replaces(given.output, overwrite=True):
        return
    if not given.output.is_dir():
        raise ValueError(f"--output {given.output} is a file; give a folder")
    there = [name for name in OUTPUTS if (given.output / name).exists()]
    if there and not given.overwrite:
        raise ValueError(
            f"{given.output / there[0]} is there already; choose another --output, or give"
            " --overwrite"
        )


def measured(given: Namespace) -> tuple[Errors, str]:
    """What was found, and of what."""
    options = {
        "formats": given.formats,
        "clip": given.clip,
        "percentile": given.percentile,
        "sample": given.sample,
        "quiet": given.quiet,
    }
    if given.checkpoint is not None:
        from lsq.study.files import tensors_in

        tensors = tensors_in(file_of(given.checkpoint))
        return measure_tensors(tensors, chosen=given.tensors or (), **options), str(
            given.checkpoint
        )
    from lsq.commands import model_batch

    batch = model_batch.load(
        given.model,
        given.text or (),
        data=given.data,
        subwords=given.sentencepiece_model,
        words=given.words or WORDS,
    )
    source = f"{given.model}, {batch.description}"
    print(f"measuring {source}")
    return measure(batch.model, batch.loss, tensors=given.tensors or (), **options), source


def file_of(path: Path) -> Path:
    """The checkpoint of a run of `lsq train-text`, or the path itself."""
    from lsq.study.files import PARTS

    if path.is_file() or any(found for pattern in PARTS for found in path.glob(pattern)):
        return path
    return run_files.find(path).checkpoint


def write(errors: Errors, source: str, folder: Path) -> None:
    """Write OUTPUTS into a folder, each whole or not at all; the JSON last, so that the others are
    there where it is.

    Raises:
        OSError: one cannot be written.
    """
    draw(errors, folder / PICTURE, f"Number formats: {source}")
    files.write_text(folder / TABLE, f"# Number formats: {source}\n\n{errors.table('github')}\n")
    content = json.dumps({"source": source, **errors.to_json()}, indent=1, allow_nan=False)
    files.write_text(folder / JSON, content + "\n")
