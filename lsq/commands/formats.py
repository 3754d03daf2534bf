"""`lsq formats`: errors of number formats in the tensors of a model."""

import json
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

from lsq import files
from lsq.commands import interruption, logs, model_batch, run_files
from lsq.commands.options import command_parser, count, replaces
from lsq.commands.tensor_files import PARTS, tensors_in
from lsq.files.lock import locked_folder
from lsq.quant.numbers import METHODS, PERCENTILE
from lsq.study import DEFAULT_FORMATS, Errors, draw, measure, measure_tensors
from lsq.study.tensors import LARGEST_SAMPLE

DESCRIPTION = """
Measure the error of number formats in real tensors: signal-to-noise in decibels (6 dB are a bit),
the largest error, and bits per value with scales counted. From a checkpoint: of its weights. From a
model and a batch of text: of its weights, of what its products read (activations), and of the
gradients of what they give.
"""
WORDS = 2048
"""Default size of the batch."""
JSON, TABLE, PICTURE = OUTPUTS = ("formats.json", "formats.md", "formats.png")


def parser() -> ArgumentParser:
    """Make the parser of `lsq formats`."""
    made = command_parser("formats", DESCRIPTION)
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a file of safetensors, PyTorch, fairseq or `lsq export`, a folder of transformers',"
        " or a run of `lsq train-text`: all float tensors with two dimensions or more",
    )
    source.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder of transformers' (with --text), a run of `lsq train-text`, or a checkpoint"
        " of fairseq's with --data: weights, activations and gradients of a batch",
    )
    model_batch.add_options(made, DEFAULT_FORMATS, WORDS)
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
    return made


def run(arguments: list[str]) -> int:
    """Measure, show, and write.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files; or nothing could be
            measured.
        OSError: the output cannot be written.
        Interrupted: SIGTERM or SIGHUP.
    """
    given = parser().parse_args(arguments)
    check(given)
    logs.quieten()
    output = given.output
    # so that all files are of one measurement
    alone = nullcontext() if output is None else locked_folder(output, "choose another --output")
    with interruption.raised(), alone:
        errors, source = measured(given)
        print(errors)
        if not errors.kinds:
            raise ValueError(f"nothing could be measured in {source}: {errors.remarks()[0]}")
        if output is not None:
            write(errors, source, output)
            print(f"\n{', '.join(OUTPUTS)} are in {output}")
    return 0


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
    for path in filter(None, (given.checkpoint, given.model, *given.text)):
        if not path.exists():
            raise FileNotFoundError(2, "is not there", str(path))
    if given.model is not None and given.model.is_file() and given.data is None:
        raise ValueError(
            f"--model {given.model} is a file; for its weights give --checkpoint {given.model}, or,"
            " if it is a checkpoint of fairseq's, the folder of its data, too, by which a batch is"
            " computed: --data"
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
    """Measure; return the errors and a description of the source."""
    names = ("formats", "clip", "percentile", "sample", "quiet")
    options = {name: getattr(given, name) for name in names}
    if given.checkpoint is not None:
        tensors = tensors_in(file_of(given.checkpoint))
        errors = measure_tensors(tensors, chosen=given.tensors, **options)
        return errors, str(given.checkpoint)
    batch = model_batch.of_options(given, WORDS)
    errors = measure(batch.model, batch.loss, tensors=given.tensors, **options)
    return errors, f"{given.model}, {batch.description}"


def file_of(path: Path) -> Path:
    """Return the checkpoint of a run of `lsq train-text`, or the path itself."""
    if path.is_file() or any(files for pattern in PARTS for files in path.glob(pattern)):
        return path
    return run_files.find(path).checkpoint


def write(errors: Errors, source: str, folder: Path) -> None:
    """Write OUTPUTS into a folder, each whole or not at all, the JSON last; OSError if one cannot
    be written."""
    draw(errors, folder / PICTURE, f"Number formats: {source}")
    files.write_text(folder / TABLE, f"# Number formats: {source}\n\n{errors.table('github')}\n")
    content = json.dumps({"source": source, **errors.to_json()}, indent=1, allow_nan=False)
    files.write_text(folder / JSON, content + "\n")
