"""One training on prepared data, the translation of its test set, and its scores.

output/<run>/model          checkpoints, losses.jsonl, train.log
output/<run>/translation    hypotheses.txt, generate-test.txt, generate.log
output/<run>/               results.json, losses.png
"""

import os
import platform
import re
from argparse import Namespace
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from fairseq.tasks import TASK_REGISTRY

import lsq
from lsq.commands import generate, stages, train
from lsq.commands.interruption import Interrupted, raised
from lsq.commands.launch import DEVICE_OPTIONS, device_of
from lsq.commands.limits import TRANSLATION_TASKS
from lsq.commands.logs import logging_to
from lsq.commands.losses import LOSSES, draw_losses, one_bar, read_losses, recording
from lsq.commands.prepare import Prepared, prepare, say
from lsq.commands.run_files import BEST, TRANSLATION
from lsq.commands.stages import Stage
from lsq.commands.train import CHECKPOINT
from lsq.config import DIMENSION_MULTIPLE
from lsq.config.quantization import read_format
from lsq.fairseq.checkpoint import LAST
from lsq.fairseq.compatibility.checkpoints import newest_sound, updates_of
from lsq.fairseq.memory import made_up_dictionary
from lsq.files.lock import locked_folder
from lsq.layers.model_formats import decoded_summary
from lsq.text.corpus import read_items, write_items
from lsq.text.score import scores

# Options

SETS = {
    "layers": ("--encoder-layers", "--decoder-layers"),
    "hidden": ("--encoder-embed-dim", "--decoder-embed-dim"),
    "feed-forward": ("--encoder-ffn-embed-dim", "--decoder-ffn-embed-dim"),
    "heads": ("--encoder-attention-heads", "--decoder-attention-heads"),
    "warmup": ("--warmup-updates",),
    "validate-every": ("--save-interval-updates",),
    "log-every": ("--log-interval",),
    **{
        name: (f"--{name}",)
        for name in "dropout max-tokens update-freq lr label-smoothing clip-norm".split()
    },
}
"""Option of `lsq train-text` -> options of `lsq train` that it sets."""
NAMES = {option: f"--{name}" for name, options in SETS.items() for option in options}
FIXED = {
    "--share-all-embeddings": None,
    "--optimizer": "lsq_adam",
    "--adam-betas": "(0.9, 0.98)",
    "--lr-scheduler": "inverse_sqrt",
    "--keep-interval-updates": "1",
    "--no-epoch-checkpoints": None,
    "--save-interval": "1000000",
    "--validate-interval": "1000000",
    "--num-workers": "0",
}
UNBOUND = frozenset(
    "--cpu --max-update --num-workers --log-interval --log-format --log-file --no-progress-bar"
    " --tensorboard-logdir --save-interval --save-interval-updates --validate-interval"
    " --validate-interval-updates --keep-interval-updates --keep-last-epochs"
    " --keep-best-checkpoints --no-epoch-checkpoints --stop-time-hours --lsq-memory"
    " --lsq-gemm-config --lsq-gemm-coverage --lsq-timeout --lsq-device --lsq-activations".split()
)
"""Options of `lsq train` that may change when a run goes on."""
OF_THIS_COMMAND = {
    "--disable-validation": "the checkpoint that translates is chosen by it",
    "--no-last-checkpoints": "an interrupted training goes on from them",
    "--max-update": "give --updates",
    "--no-save": "the checkpoints are needed to translate",
    "--save-dir": "give --output and --name",
}
"""Options of `lsq train` that cannot follow a lone --, and what to do instead."""
REPORTED_PACKAGES = ("torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "numpy")
PREPARATION_SECONDS = 10.0


def set_by(given: Namespace) -> dict[str, str]:
    values = {name: str(getattr(given, name.replace("-", "_"))) for name in SETS}
    return {option: values[name] for name, options in SETS.items() for option in options}


def named_options(words: list[str]) -> dict[str, str | None]:
    """Return option -> value, None for a switch; the key "" has the words before all options."""
    values: dict[str, list[str]] = {}
    option = ""
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            values[option] = [value] if value else []
        else:
            values.setdefault(option, []).append(word)
    return {option: " ".join(texts) or None for option, texts in values.items()}


def bound(training: dict[str, str | None], extra: list[str]) -> dict[str, str | bool]:
    """Return the options that a run depends on, as in `lsq train-text`; True for switches, and the
    text of a file of formats."""
    further = named_options(extra)
    ours = {
        NAMES.get(name, name): value
        for name, value in training.items()
        if name not in further and name not in UNBOUND
    }
    theirs = {name: value for name, value in further.items() if name not in UNBOUND}
    fields = {name: name.removeprefix("--lsq-").replace("-", "_") for name in ours | theirs}
    return {
        name: True if value is None else read_format(fields[name], value)
        for name, value in (ours | theirs).items()
    }


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `lsq train-text`, options of `lsq train` that they set, and options after --."""

    given: Namespace
    training: dict[str, str | None]
    extra: list[str]

    def arguments(self, data: Path, folder: Path) -> list[str]:
        """Return the arguments of `lsq train` that reads `data` and writes into `folder`."""
        training = {"--save-dir": str(folder), "--distributed-world-size": "1", **self.training}
        words = [word for option in training.items() for word in option if word is not None]
        return [str(data), *words, "--max-update", str(self.given.updates), *self.extra]


# The folder of a run

NAME = re.compile(r"\w[\w.+=@,-]*")
RESERVED = ("text", "vocabulary", "data", "numbers")
STAGE = "run"
UPDATES = "--max-update"
"""Part of the key of the stage `model` alone: more updates go on with the same run."""
SOURCES = ("--lsq-from", "--finetune-from-model", "--restore-file")


def check_name(name: str) -> str:
    """Return a run's name; ValueError if it is no plain folder name, or a folder of the data."""
    if not NAME.fullmatch(name) or len(name.encode()) > 200:
        raise ValueError(
            f"--name {name!r} is not a plain folder name: letters, digits and _ . + = @ , - are"
            " allowed, the first of them a letter, digit or _; to write elsewhere, give --output"
        )
    if name.casefold() in RESERVED:
        raise ValueError(
            f"--name {name} is the name of a folder of the data; choose any but"
            f" {', '.join(RESERVED)}"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The folder output/<name>, and its stages: the whole run, the training, the translation."""

    prepared: Prepared
    name: str
    remedy: str = "choose another --name, or delete it with --overwrite"

    @property
    def path(self) -> Path:
        return self.prepared.output / self.name

    @property
    def run(self) -> Stage:
        return Stage(name=STAGE, folder=self.path, makes=("results.json", "losses.png"))

    @property
    def model(self) -> Stage:
        makes = (CHECKPOINT, LOSSES, "train.log", "crash.pt")
        return Stage(name="model", folder=self.path / "model", makes=makes)

    @property
    def translation(self) -> Stage:
        makes = ("hypotheses.txt", "generate-test.txt", "generate.log")
        return Stage(name="translation", folder=self.path / TRANSLATION, makes=makes)

    def updates(self) -> int:
        last = self.model.folder / LAST
        return updates_of(last) if last.exists() else 0

    def goes_on(self, key: dict) -> bool:
        return not self._differences(key) and self.run.check_own() is not None

    def check(self, key: dict, updates: int, overwrite: bool) -> None:
        """Raise ValueError if a run may not begin or go on here; the message names what differs."""
        check_data(self.prepared, except_run=self.name)
        self.translation.check_own()
        different = self._differences(key)
        if overwrite:
            if different or updates < self.updates():
                self._check_sources(key)
            return
        if different and any(path.suffix == ".pt" for path in self.model.made()):
            of_data = any(entry.partition(": ")[0] in self.prepared.settings for entry in different)
            raise ValueError(
                f"{self.path} holds a run with other options ({'; '.join(different)});"
                f" {self.remedy.replace('--name', '--output') if of_data else self.remedy}"
            )
        made = 0 if different else self.updates()
        if updates < made:
            raise ValueError(
                f"--updates is {updates}, but {self.path} has made {made} already; give at least"
                f" {made}, or {self.remedy}"
            )

    def claim(self, key: dict, updates: int) -> None:
        """Mark the folder as this run's; remove a run that differs or made more updates."""
        if self._differences(key) or updates < self.updates():
            for stage in (self.translation, self.model, self.run):
                stage.remove()
        self.run.mark(key, finished=False)

    def _differences(self, key: dict) -> list[str]:
        markers = [stage.check_own() for stage in (self.run, self.model)]
        keys = [{**marker.key, UPDATES: None} for marker in markers if marker is not None]
        return next(filter(None, (stages.differences(before, key) for before in keys)), [])

    def _check_sources(self, key: dict) -> None:
        for option in SOURCES:
            source = key.get(option)
            if source is not None and Path(source).resolve().is_relative_to(self.path.resolve()):
                raise ValueError(
                    f"{option} {source} is of the run that --overwrite removes; choose another"
                    " --name"
                )


def check_data(prepared: Prepared, except_run: str | None = None) -> None:
    """Raise ValueError if a run in the output folder, but `except_run`, has other data."""
    for path in sorted(prepared.output.glob(f"[!.]*/{stages.MARKER}")):
        name, marker = path.parent.name, stages.read_marker(path.parent)
        if name == except_run or marker is None or marker.stage != STAGE:
            continue
        theirs = {option: marker.key.get(option) for option in prepared.settings}
        if different := stages.differences(theirs, prepared.settings):
            raise ValueError(
                f"{prepared.output} holds the data of the run {name}, which were made with other"
                f" options ({'; '.join(different)}); choose another --output"
            )


# A run


@raised()  # while it prepares and translates; a training finishes its update first
def run(prepared: Prepared, options: RunOptions) -> dict:
    """Make the data, train, translate and score, from where it stopped; return the results."""
    given = options.given
    folder = RunFolder(prepared=prepared, name=given.name)
    key = key_of(prepared, options)
    decoded = None if folder.goes_on(key) else check_training(prepared, options)
    folder.check(key, given.updates, given.overwrite)
    with locked_folder(folder.path, "choose another --name"):
        with locked_folder(prepared.output, "choose another --output", seconds=PREPARATION_SECONDS):
            # again: another process may have written until now
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
            by_time = "--stop-time-hours" in options.extra  # may end before all updates
            folder.model.mark(key, finished=not by_time or folder.updates() >= given.updates)
        stages.run_stage(
            folder.translation,
            {**key, "updates": folder.updates(), "--beam": given.beam},
            lambda target: translate(prepared, options, folder.model.folder, target),
            say,
        )
        return report(folder, options, key)


def key_of(prepared: Prepared, options: RunOptions) -> dict:
    return {**prepared.settings, **bound(options.training, options.extra)}


def check_folder(prepared: Prepared, options: RunOptions, remedy: str) -> None:
    """Check the folder of a run before a command begins several; `remedy` ends the messages."""
    folder = RunFolder(prepared=prepared, name=options.given.name, remedy=remedy)
    folder.check(key_of(prepared, options), options.given.updates, options.given.overwrite)


def check_training(prepared: Prepared, options: RunOptions) -> str | None:
    """Build the training's model; return a sentence on its decoded tensors, None without any."""
    with logging_to(Path(os.devnull)):
        arguments = options.arguments(prepared.data, Path("unused"))
        args = train.parse_training(arguments, with_data=False)
        if args.task in TRANSLATION_TASKS:
            words = made_up_dictionary(prepared.size)
            words.pad_to_multiple_(DIMENSION_MULTIPLE)
            task = TASK_REGISTRY[args.task](args, words, words)
            task.build_criterion(args)
            return decoded_summary(task.build_model(args))
    return None


def train_model(prepared: Prepared, options: RunOptions, folder: RunFolder) -> None:
    """Train from the last checkpoint, or else from the newest sound one, or from the start."""
    model = folder.model.folder
    arguments = options.arguments(prepared.data, model)
    done = folder.updates()
    if not done and (other := newest_sound(model / LAST)) and "--restore-file" not in options.extra:
        # an earlier one, complete: the process or the disk failed while writing the last
        arguments += ["--restore-file", str(other)]
        done = updates_of(other)
    how = f"going on from update {done}" if done else "training"
    say(f"{folder.name}: {how}; the log is {model / 'train.log'}")
    given, description = options.given, f"training {folder.name}"
    with (
        logging_to(model / "train.log"),
        recording(model / LOSSES, given.updates, description, given.quiet),
    ):
        try:
            train.run(arguments)
        except Interrupted as stopped:
            stopped.message += "; the same command goes on from there"
            raise


def translate(prepared: Prepared, options: RunOptions, model: Path, folder: Path) -> None:
    given = options.given
    arguments = [str(prepared.data), "--path", str(model / BEST), "--results-path", str(folder)]
    arguments += "--gen-subset test --max-tokens 4096 --num-workers 0 --bpe sentencepiece".split()
    arguments += ["--beam", str(given.beam), "--max-len-b", str(given.max_length)]
    arguments += ["--sentencepiece-model", str(prepared.vocabulary)]
    for option in ("--cpu", *DEVICE_OPTIONS.values()):
        if option in options.training:
            arguments += filter(None, (option, options.training[option]))
    with (
        logging_to(folder / "generate.log"),
        one_bar(f"translating with {given.name}", given.quiet),
    ):
        generate.run(arguments)
    count = len(prepared.lines("test", "tgt"))
    hypotheses = generate.read_hypotheses(folder / "generate-test.txt", count)
    write_items(folder / "hypotheses.txt", hypotheses)


def hypotheses_of(prepared: Prepared, name: str) -> list[str]:
    return read_items(prepared.output / name / TRANSLATION / "hypotheses.txt")


def report(folder: RunFolder, options: RunOptions, key: dict) -> dict:
    """Score a finished run; write results.json and losses.png."""
    prepared, given = folder.prepared, options.given
    curve = read_losses(folder.model.folder / LOSSES)
    hypotheses = hypotheses_of(prepared, given.name)
    best = updates_of(folder.model.folder / BEST)
    results = {
        "run": given.name,
        **scores(hypotheses, prepared.lines("test", "tgt"), given.bleu_tokenizer),
        "test_pairs": len(hypotheses),
        "updates": curve.updates,
        "training_seconds": round(curve.seconds, 3),
        "best_update": best,
        "best_validation_loss": curve.validation.get(best),
        "options": {**key, "--beam": given.beam, "more": options.extra},
        "versions": {
            "lsq": lsq.__version__,
            **{name: metadata.version(name) for name in REPORTED_PACKAGES},
        },
        "machine": {
            "architecture": platform.machine(),
            "device": device_of(given),
            "threads": torch.get_num_threads(),
            "gpus": torch.cuda.device_count(),
        },
    }
    stages.write_json(folder.path / "results.json", results)
    draw_losses({given.name: curve}, folder.path / "losses.png", f"Losses of {given.name}")
    return results
