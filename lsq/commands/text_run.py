"""One training on prepared data, its translation of the test set and its scores.

output/<run>/model          checkpoints, losses.jsonl, train.log
output/<run>/translation    hypotheses.txt, generate-test.txt, generate.log
output/<run>/               results.json, losses.png
"""

import os
import platform
from argparse import Namespace
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from fairseq.tasks import TASK_REGISTRY

import lsq
from lsq.commands import device, generate, stages, train, training_options
from lsq.commands.interruption import Interrupted, raised
from lsq.commands.limits import TRANSLATION
from lsq.commands.logs import logging_to
from lsq.commands.losses import LOSSES, draw_losses, read_losses
from lsq.commands.prepare import Prepared, prepare, say
from lsq.commands.progress import one_bar, recording
from lsq.commands.run_files import BEST
from lsq.commands.run_folder import UPDATES, RunFolder
from lsq.config import DIMENSION_MULTIPLE
from lsq.fairseq.checkpoint import LAST
from lsq.fairseq.compatibility.checkpoints import updates_of
from lsq.fairseq.compatibility.soundness import newest_sound
from lsq.fairseq.memory import made_up_dictionary
from lsq.files.lock import locked_folder
from lsq.layers.model_formats import decoded_summary
from lsq.text.corpus import read_items, write_items
from lsq.text.score import scores

REPORTED_PACKAGES = ("torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "numpy")
PREPARATION_SECONDS = 10.0
"""To wait for another run that prepares the data of the same output folder: mostly it only looks at
them."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a training and its translation."""

    given: Namespace
    """The options of `lsq train-text`, a name of the run among them."""
    training: dict[str, str | None]
    """Options of `lsq train` that follow from them, with their values; None for switches."""
    extra: list[str]
    """Further options of `lsq train`, as the user gave them."""

    def arguments(self, data: Path, folder: Path) -> list[str]:
        """The command line of `lsq train` with this data that writes into this folder."""
        training = {"--save-dir": str(folder), "--distributed-world-size": "1", **self.training}
        given = [
            word
            for option, value in training.items()
            for word in (option, value)
            if word is not None
        ]
        return [str(data), *given, "--max-update", str(self.given.updates), *self.extra]


@raised()  # while it prepares and translates; a training finishes its update first
def run(prepared: Prepared, options: RunOptions) -> dict:
    """Make the data, train, translate the test set and score; what is done is skipped, what was
    begun is continued.

    All options are compared with what is there before anything is written.

    Returns:
        The content of results.json.

    Raises:
        ValueError: the run exists with other options, or an option is wrong.
        Busy: another process is at work on this run, or on the data.
        Interrupted: a signal came; the same call later continues.
    """
    given = options.given
    folder = RunFolder(prepared=prepared, name=given.name)
    key = key_of(prepared, options)
    decoded = None if folder.goes_on(key) else check_training(prepared, options)
    folder.check(key, given.updates, given.overwrite)
    with locked_folder(folder.path, "choose another --name"):
        with locked_folder(prepared.output, "choose another --output", seconds=PREPARATION_SECONDS):
            # again: somebody may have been at work until now
            folder.check(key, given.updates, given.overwrite)
            prepare(prepared)
            folder.claim(key, given.updates)
        key = {**key, UPDATES: given.updates}
        if folder.model.is_done(key):
            say(f"{given.name}: already trained")
        else:
            folder.model.mark(key, finished=False)
            if decoded is not None:
                say(f"{given.name}: {decoded}")
            train_model(prepared, options, folder)
            by_time = "--stop-time-hours" in options.extra  # ends a sitting, not the training
            folder.model.mark(key, finished=not by_time or folder.updates() >= given.updates)
        stages.run_stage(
            folder.translation,
            {**key, "updates": folder.updates(), "--beam": given.beam},
            lambda target: translate(prepared, options, folder.model.folder, target),
            say,
        )
        return report(folder, options, key)


def key_of(prepared: Prepared, options: RunOptions) -> dict:
    """Key of the run: options that its results depend on."""
    return {**prepared.settings, **training_options.bound(options.training, options.extra)}


def check_folder(prepared: Prepared, options: RunOptions, remedy: str) -> None:
    """Refuse what the folder of a run does not take, for a command that begins several.

    Args:
        remedy: what a user of that command can do.

    Raises:
        ValueError: see `RunFolder.check`.
    """
    folder = RunFolder(prepared=prepared, name=options.given.name, remedy=remedy)
    folder.check(key_of(prepared, options), options.given.updates, options.given.overwrite)


def check_training(prepared: Prepared, options: RunOptions) -> str | None:
    """Refuse what the training would be refused for, before anything is written or removed: build
    its model.

    Returns:
        What the model multiplies as decoded values, in words; None: nothing.

    Raises:
        FileNotFoundError, ValueError: an option is wrong, or does not go with another.
    """
    with logging_to(Path(os.devnull)):
        args = train.parse_training(
            options.arguments(prepared.data, Path("unused")), with_data=False
        )
        if args.task in TRANSLATION:
            words = made_up_dictionary(prepared.size)
            words.pad_to_multiple_(DIMENSION_MULTIPLE)
            task = TASK_REGISTRY[args.task](args, words, words)
            task.build_criterion(args)
            return decoded_summary(task.build_model(args))
    return None


def train_model(prepared: Prepared, options: RunOptions, folder: RunFolder) -> None:
    """Train into the run's folder, from the last checkpoint there if there is one, or else the
    newest sound one.

    Raises:
        Interrupted: a signal came.
    """
    model = folder.model.folder
    arguments = options.arguments(prepared.data, model)
    done = folder.updates()
    if not done and (other := newest_sound(model / LAST)) and "--restore-file" not in options.extra:
        # written whole before the process or the disk failed
        arguments += ["--restore-file", str(other)]
        done = updates_of(other)
    say(
        f"{folder.name}: {f'going on from update {done}' if done else 'training'}; the log is"
        f" {model / 'train.log'}"
    )
    with (
        logging_to(model / "train.log"),
        recording(
            model / LOSSES,
            options.given.updates,
            f"training {options.given.name}",
            options.given.quiet,
        ),
    ):
        try:
            train.run(arguments)
        except Interrupted as stopped:
            stopped.message += "; the same command goes on from there"
            raise


def translate(prepared: Prepared, options: RunOptions, model: Path, folder: Path) -> None:
    """Translate the test set with the checkpoint of least validation loss."""
    arguments = [str(prepared.data), "--path", str(model / BEST), "--gen-subset", "test"]
    arguments += [
        "--results-path",
        str(folder),
        "--beam",
        str(options.given.beam),
        "--max-tokens",
        "4096",
    ]
    arguments += ["--num-workers", "0", "--max-len-b", str(options.given.max_length)]
    arguments += ["--bpe", "sentencepiece", "--sentencepiece-model", str(prepared.vocabulary)]
    for option in ("--cpu", *device.OPTIONS):
        if option in options.training:
            arguments += filter(None, (option, options.training[option]))
    with (
        logging_to(folder / "generate.log"),
        one_bar(f"translating with {options.given.name}", options.given.quiet),
    ):
        generate.run(arguments)
    hypotheses = generate.read_hypotheses(
        folder / "generate-test.txt", len(prepared.lines("test", "tgt"))
    )
    write_items(folder / "hypotheses.txt", hypotheses)


def hypotheses_of(prepared: Prepared, name: str) -> list[str]:
    """The translations of the test set by the run of this name."""
    return read_items(prepared.output / name / "translation" / "hypotheses.txt")


def report(folder: RunFolder, options: RunOptions, key: dict) -> dict:
    """Score a finished run; writes results.json and losses.png, and returns the content of the
    former."""
    prepared = folder.prepared
    curve = read_losses(folder.model.folder / LOSSES)
    hypotheses = hypotheses_of(prepared, options.given.name)
    best = updates_of(folder.model.folder / BEST)
    results = {
        "run": options.given.name,
        **scores(hypotheses, prepared.lines("test", "tgt"), options.given.bleu_tokenizer),
        "test_pairs": len(hypotheses),
        "updates": curve.updates,
        "training_seconds": round(curve.seconds, 3),
        "best_update": best,
        "best_validation_loss": curve.validation.get(best),
        "options": {**key, "--beam": options.given.beam, "more": options.extra},
        "versions": {
            "lsq": lsq.__version__,
            **{name: metadata.version(name) for name in REPORTED_PACKAGES},
        },
        "machine": {
            "architecture": platform.machine(),
            "device": device.used(options.given),
            "threads": torch.get_num_threads(),
            "gpus": torch.cuda.device_count(),
        },
    }
    stages.write_json(folder.path / "results.json", results)
    draw_losses(
        {options.given.name: curve}, folder.path / "losses.png", f"Losses of {options.given.name}"
    )
    return results
