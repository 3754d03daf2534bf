"""One training on prepared data, its translation of the test set and its scores.

output/<run>/model          checkpoints, losses.jsonl, train.log
output/<run>/translation    hypotheses.txt, generate-test.txt, generate.log
output/<run>/               results.json, losses.png
"""

import platform
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from lsq.commands import generate, stages, train
from lsq.commands.logs import logging_to
from lsq.commands.prepare import Prepared, say
from lsq.commands.progress import one_bar, read_losses, recording
from lsq.commands.score import draw_losses, scores
from lsq.files import write_text

REPORTED_PACKAGES = ("lsq", "torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "numpy")
LOSSES = "losses.jsonl"
MACHINE_OPTIONS = ("--cpu", "--num-workers")
"""Options that may differ when a run is continued."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to train and how to translate."""

    name: str
    """The run's folder within the output folder."""
    updates: int
    training: dict[str, str | None]
    """Options of `lsq train`, with their values; None for switches."""
    beam: int
    max_length: int
    """Largest number of pieces of a translation."""
    bleu_tokenizer: str
    extra: list[str] = field(default_factory=list)
    """Further options of `lsq train`, as the user gave them."""
    overwrite: bool = False
    """Delete an earlier run of this name that had other options."""
    quiet: bool = False
    """No progress bars."""

    def arguments(self) -> list[str]:
        """The command line of `lsq train`, without the data and where to write."""
        given = [word for option, value in self.training.items() for word in (option, value) if word is not None]
        return [*given, "--max-update", str(self.updates), *self.extra]


def run(prepared: Prepared, options: RunOptions) -> dict:
    """Train, translate the test set and score; what is finished is skipped, what was begun is continued.

    Returns:
        The content of results.json.

    Raises:
        ValueError: the run exists with other options, or an option is wrong.
        Interrupted: a signal came; the same call later continues.
    """
    folder = prepared.output / options.name
    model, translation = folder / "model", folder / "translation"
    training = {option: value for option, value in options.training.items() if option not in MACHINE_OPTIONS}
    key = {"data": prepared.digest, "--max-update": options.updates, **training, "more": options.extra}
    claim(folder, key, options.overwrite)
    if stages.read_stamp(model) == key:
        say(f"{options.name}: already trained")
    else:
        train_model(prepared, options, model)
        stages.write_stamp(model, key)
    translation_key = {"model": stages.key_digest(key), "beam": options.beam, "max_length": options.max_length}
    stages.run_stage(translation, translation_key, lambda target: translate(prepared, options, model, target), say)
    return report(prepared, options, key)


def claim(folder: Path, key: dict, overwrite: bool) -> None:
    """Make sure that what lies in a run's folder was made with the same options.

    Raises:
        ValueError: it was not, and `overwrite` is off; names every difference.
    """
    before = stages.read_stamp(folder)
    if before is not None and before != key:
        if not overwrite:
            raise ValueError(
                f"{folder} holds a run with other options ({'; '.join(stages.differences(before, key))});"
                " choose another --name, or delete it with --overwrite"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stages.write_stamp(folder, key)


def train_model(prepared: Prepared, options: RunOptions, folder: Path) -> None:
    """Train into `folder`, from the last checkpoint there if there is one."""
    folder.mkdir(exist_ok=True)
    arguments = [str(prepared.data), "--save-dir", str(folder), "--distributed-world-size", "1"]
    with (
        logging_to(folder / "train.log"),
        recording(folder / LOSSES, options.updates, f"training {options.name}", options.quiet),
    ):
        train.run([*arguments, *options.arguments()])


def translate(prepared: Prepared, options: RunOptions, model: Path, folder: Path) -> None:
    """Translate the test set with the checkpoint of least validation loss."""
    arguments = [str(prepared.data), "--path", str(model / "checkpoint_best.pt"), "--gen-subset", "test"]
    arguments += [
        "--results-path",
        str(folder),
        "--beam",
        str(options.beam),
        "--max-tokens",
        "4096",
        "--num-workers",
        "0",
    ]
    arguments += ["--max-len-b", str(options.max_length), "--bpe", "sentencepiece"]
    arguments += ["--sentencepiece-model", str(prepared.vocabulary)]
    if "--cpu" in options.training:
        arguments.append("--cpu")
    with logging_to(folder / "generate.log"), one_bar(f"translating with {options.name}", options.quiet):
        generate.run(arguments)
    hypotheses = generate.read_hypotheses(folder / "generate-test.txt", len(prepared.lines("test", "tgt")))
    write_text(folder / "hypotheses.txt", "".join(line + "\n" for line in hypotheses))


def hypotheses_of(prepared: Prepared, name: str) -> list[str]:
    """The translations of the test set by the run of this name."""
    text = (prepared.output / name / "translation" / "hypotheses.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


def report(prepared: Prepared, options: RunOptions, key: dict) -> dict:
    """Score a finished run; writes results.json and losses.png, and returns the content of the former."""
    folder = prepared.output / options.name
    curve = read_losses(folder / "model" / LOSSES)
    hypotheses = hypotheses_of(prepared, options.name)
    results = {
        "run": options.name,
        **scores(hypotheses, prepared.lines("test", "tgt"), options.bleu_tokenizer),
        "test_pairs": len(hypotheses),
        "updates": curve.updates,
        "training_seconds": round(curve.seconds, 1),
        "best_validation_loss": min(curve.validation.values(), default=None),
        "options": {**key, "--beam": options.beam},
        "versions": {name: metadata.version(name) for name in REPORTED_PACKAGES},
        "machine": {
            "architecture": platform.machine(),
            "threads": torch.get_num_threads(),
            "gpus": torch.cuda.device_count(),
        },
    }
    stages.write_json(folder / "results.json", results)
    draw_losses({options.name: curve}, folder / "losses.png", f"Losses of {options.name}")
    return results
