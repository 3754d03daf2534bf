"""`lsq sensitivity`: the cost in loss of each number format in each layer of a trained model."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from tqdm import tqdm

from lsq.commands import interruption, model_batch
from lsq.commands.interruption import Interrupted, name_of
from lsq.commands.model_batch import BatchOptions, ModelBatch
from lsq.commands.options import (
    AnyPath,
    Folder,
    check_there,
    check_writable,
    command_parser,
    replaces,
)
from lsq.files import write_text
from lsq.files.lock import locked_folder
from lsq.quant.numbers import METHODS
from lsq.study import Costs, Keep, draw_costs, estimate, sensitivity
from lsq.study.costs import write_costs
from lsq.study.sensitivity import FORMATS
from lsq.study.tensors import ACTIVATION

JSON, TABLE, PICTURE = OUTPUTS = ("sensitivity.json", "sensitivity.md", "sensitivity.png")
BATCH_WORDS = 4096
"""Most words that are computed together, padding included."""


class Options(BatchOptions):
    """Measure how much loss each number format costs in each weight of a trained model, and in each
    input of a product: one tensor at a time, and as an estimate from gradients. Stop it whenever
    you like: what is done is in the file, and the same command goes on with the rest."""

    model: AnyPath
    """a folder of transformers' (with --text), a run of `lsq train-text`, or a checkpoint of
    fairseq's with --data"""
    clip: Annotated[str, METHODS] = "mse"
    """how clips of weights are measured"""
    estimate: bool = False
    """no measurement: only an estimate for weights, from gradients of labels that are drawn from
    the model's predictions, in one pass over the text"""
    weights_only: bool = False
    """leave out the inputs of products"""
    output: Folder
    """folder for sensitivity.json, sensitivity.md and sensitivity.png"""
    overwrite: bool = False
    """begin anew, whatever sensitivity.json is there"""
    words = 8192
    formats = list(FORMATS)


def run(arguments: list[str]) -> int:
    """Measure and write, or go on where an earlier run ended; Interrupted after a signal."""
    given = command_parser("sensitivity", Options).parse_args(arguments)
    check_there(given.model, *given.text)
    if given.output.exists() and not given.output.is_dir():
        raise ValueError(f"--output {given.output} is a file; give a folder")
    check_writable(given.output, makes_folders=True)
    with locked_folder(given.output, "choose another --output"), interruptible(given.overwrite):
        batch = model_batch.load(given)
        print(f"measuring {given.model}, {batch.description}")
        costs = (_estimated if given.estimate else _measured)(given, batch)
        draw_costs(costs, given.output / PICTURE)
        text = f"# Which bits where: {given.model}\n\n{costs.table('github')}\n"
        write_text(given.output / TABLE, text)
        print(costs.table())
        if not (given.weights_only or given.estimate) and not costs.of(ACTIVATION):
            print(
                "\nno activations: layers of lsq round theirs by themselves; measure the float"
                " model for those"
            )
        print(f"\n{', '.join(OUTPUTS)} are in {given.output}")
    return 0


def _measured(given: Options, batch: ModelBatch) -> Costs:
    with _progress(given.quiet) as progress:
        return sensitivity(
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
                about=_about(given, batch),
            ),
        )


def _estimated(given: Options, batch: ModelBatch) -> Costs:
    replaces(given.output / JSON, given.overwrite)
    costs = estimate(
        batch.model,
        lambda model, numbers: batch.losses(numbers),
        [[number] for number in range(len(batch.lengths))],
        formats=given.formats,
        clip=given.clip,
        tensors=given.tensors,
        about=_about(given, batch),
    )
    write_costs(given.output / JSON, costs)
    return costs


def _about(given: Options, batch: ModelBatch) -> dict[str, str]:
    return {"model": str(given.model), "text": batch.description, "loss": "nats per word"}


def by_length(lengths: Sequence[int], words: int) -> list[list[int]]:
    """Batch indices of sentences of similar length: one, or at most `words` words with padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= words:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


@contextlib.contextmanager
def interruptible(overwrite: bool) -> Iterator[None]:
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
    with tqdm(desc="measuring", unit=" tensors", disable=quiet or None) as bar:

        def progress(done: int, wanted: int, name: str) -> None:
            bar.total = wanted
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield progress
