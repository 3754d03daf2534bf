"""`lsq sensitivity`: what each layer of a trained model costs in loss in each number format."""

import contextlib
import signal
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from lsq.commands import interruption, model_batch
from lsq.commands.interruption import Interrupted, name_of
from lsq.commands.options import HelpFormatter, check_writable, count, one_line_errors
from lsq.files import write_text
from lsq.files.lock import locked_folder
from lsq.quant.numbers import METHODS
from lsq.study import Keep, draw_costs, sensitivity
from lsq.study.costs_table import table
from lsq.study.sensitivity import FORMATS
from lsq.study.tensors import ACTIVATION

JSON, TABLE, PICTURE = OUTPUTS = ("sensitivity.json", "sensitivity.md", "sensitivity.png")
BATCH_WORDS = 4096
"""Of what is computed together, padding counted."""
DESCRIPTION = """
Say what each weight of a trained model, and what each product reads, costs in loss in each number
format: measured, one tensor at a time, and estimated from gradients. Stop it whenever you like:
what is done is in the file, and the same command goes on with the rest.
"""


def parser() -> ArgumentParser:
    """The command line of `lsq sensitivity`."""
    made = ArgumentParser(
        prog="lsq sensitivity",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    one_line_errors(made)
    made.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a folder of transformers' (with --text), a run of `lsq train-text`, or a checkpoint"
        " of fairseq's with "
        "--data",
    )
    made.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="sentences, one a line, and a second file of translations for a model that translates;"
        " without it, the "
        "validation data of the training",
    )
    made.add_argument("--words", type=count, default=8192, metavar="N", help="of the text, about")
    made.add_argument("--data", type=Path, metavar="DIR", help="of a checkpoint: its data folder")
    made.add_argument(
        "--sentencepiece-model", type=Path, metavar="FILE", help="of a checkpoint, for --text"
    )
    made.add_argument(
        "--tensors",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="names of weights, with * and ?; without it, all",
    )
    made.add_argument(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        metavar="FORMAT",
        help="such as nvfp4 or int4/group16/uint4, see docs/numbers.md",
    )
    made.add_argument(
        "--clip", choices=METHODS, default="mse", help="how clips of weights are measured"
    )
    made.add_argument("--weights-only", action="store_true", help="leave out what products read")
    made.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help=f"folder for {', '.join(OUTPUTS)}"
    )
    made.add_argument(
        "--overwrite", action="store_true", help=f"begin anew, whatever {JSON} is there"
    )
    made.add_argument("--quiet", action="store_true", help="no progress bar")
    return made


def run(arguments: list[str]) -> int:
    """The subcommand.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files.
        OSError: the output cannot be written.
        Interrupted: a signal came.
    """
    given = parser().parse_args(arguments)
    for path in (given.model, *given.text):
        if not path.exists():
            raise FileNotFoundError(2, "is not there", str(path))
    if given.output.exists() and not given.output.is_dir():
        raise ValueError(f"--output {given.output} is a file; give a folder")
    check_writable(given.output, makes_folders=True)
    with locked_folder(given.output, "choose another --output"), _interruptible(given.overwrite):
        batch = model_batch.load(
            given.model,
            given.text,
            data=given.data,
            subwords=given.sentencepiece_model,
            words=given.words,
        )
        print(f"measuring {given.model}, {batch.description}")
        with _progress(given.quiet) as progress:
            costs = sensitivity(
                batch.model,
                lambda model, numbers: batch.losses(numbers),
                by_length(batch.lengths, BATCH_WORDS),
                samples=[[number] for number in range(len(batch.lengths))],
                formats=given.formats,
                clip=given.clip,
                tensors=given.tensors,
                activations=not given.weights_only,
                keep=Keep(
                    path=given.output / JSON,
                    anew=given.overwrite,
                    progress=progress,
                    about={
                        "model": str(given.model),
                        "text": batch.description,
                        "loss": "nats per word",
                    },
                ),
            )
        draw_costs(costs, given.output / PICTURE)
        write_text(
            given.output / TABLE, f"# Which bits where: {given.model}\n\n{table(costs, 'github')}\n"
        )
        print(table(costs))
        if not given.weights_only and not costs.of(ACTIVATION):
            print(
                "\nno activations: layers of lsq round theirs by themselves; measure the float"
                " model for those"
            )
        print(f"\n{', '.join(OUTPUTS)} are in {given.output}")
    return 0


def by_length(lengths: Sequence[int], words: int) -> list[list[int]]:
    """Numbers of sentences of like length together, at most so many words with padding, or one
    sentence."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= words:
            found[-1].append(number)
        else:
            found.append([number])
    return found


@contextlib.contextmanager
def _interruptible(overwrite: bool) -> Iterator[None]:
    """Within this context signals end the work with a word on how to go on."""
    advice = f"the same command{' without --overwrite' if overwrite else ''} goes on from there"
    try:
        with interruption.raised():
            yield
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"stopped by {name_of(signal.SIGINT)}; {advice}") from None
    except Interrupted as stopped:
        stopped.message += f"; {advice}"
        raise


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Within this context, what to call after each tensor."""
    with tqdm(desc="measuring", unit=" tensors", disable=quiet or None) as bar:

        def progress(done: int, wanted: int, name: str) -> None:
            bar.total = wanted
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield progress
