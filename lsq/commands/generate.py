"""`lsq generate`: fairseq-generate with lsq's plugin loaded and fairseq's traps removed."""

import functools
import logging
import os
import re
from pathlib import Path

import fairseq_cli.generate as fairseq_generate
from fairseq import checkpoint_utils, options
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY

from lsq import extras
from lsq.commands import launch, limits
from lsq.commands.options import check_writable
from lsq.commands.train import TASK, check_data, parse, peek
from lsq.fairseq import architectures
from lsq.fairseq.checkpoint import options_in
from lsq.fairseq.compatibility import replaced

HYPOTHESIS = re.compile(r"D-(\d+)\t[^\t]*\t(.*)")
"""Line of fairseq-generate with a translation: sentence number, score, text."""


def run(arguments: list[str]) -> int:
    """Translate as the options say; ValueError or OSError if the options or the data are wrong."""
    checkpoint = Path((peek(arguments, "--path") or "").split(os.pathsep)[0])
    args = parse(
        options.get_generation_parser(default_task=task_of(checkpoint)),
        arguments,
        "lsq generate",
        "Translate with a trained model: the options are fairseq-generate's.",
        {},
    )
    if args.path is None:
        raise ValueError("give the checkpoint to translate with: --path")
    check_data(args)
    if args.results_path is not None:
        check_writable(Path(args.results_path), "--results-path", makes_folders=True)
    launch.choose_device(args, is_ours(checkpoint))
    launch.check_precision(args)
    limits.check_generation(args)
    if args.bpe == "sentencepiece":
        check_subwords(args.sentencepiece_model)
    logging.getLogger().setLevel(logging.INFO)
    with replaced(checkpoint_utils, load_model_ensemble=functools.partial(load_fitting, args.data)):
        fairseq_generate.main(convert_namespace_to_omegaconf(args))
    return 0


def task_of(checkpoint: Path) -> str:
    """Return the task that a checkpoint was trained with; lsq_translation if it is unknown."""
    given = options_in(checkpoint, "task")
    name = given.get("_name") or given.get("task")
    return name if isinstance(name, str) and name in TASK_REGISTRY else TASK


def is_ours(checkpoint: Path) -> bool:
    given = options_in(checkpoint, "model")
    return architectures.is_ours(given.get("arch") or given.get("_name") or "")


def check_subwords(path: str) -> None:
    extras.require("--sentencepiece-model", "text")
    from sentencepiece import SentencePieceProcessor

    try:
        SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"--sentencepiece-model {path} is missing, damaged or no model of sentencepiece's"
            f" ({error}); give vocabulary/sentencepiece.model of the text that the model was"
            " trained on"
        ) from None


def load_fitting(
    data: str, paths: list[str], arg_overrides=None, task=None, **options
) -> tuple[list, object]:
    """Load as fairseq's load_model_ensemble does; ValueError if a checkpoint does not fit."""
    try:
        models, of_last = load_model_ensemble(paths, arg_overrides, task, **options)
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        first = " ".join(str(error).partition("\n")[2].split("\n")[0].split())
        raise ValueError(
            f"{', '.join(paths)} does not fit the model that its options, --model-overrides and the"
            f" dictionaries (dict.*.txt) of {data} describe; use those of the training: {first}"
        ) from None
    if task is None and not isinstance(models[0], FairseqLanguageModel):
        raise ValueError(
            f"--lm-path is {paths[0]}, which is of a {type(models[0]).__name__} and no language"
            " model"
        )
    return models, of_last


def read_hypotheses(path: Path, count: int) -> list[str]:
    """Return the best translations of fairseq-generate, in order; ValueError if one is missing."""
    best = {}
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if match := HYPOTHESIS.fullmatch(line.rstrip("\n")):
                best.setdefault(int(match[1]), match[2])
    missing = [number for number in range(count) if number not in best]
    if missing:
        raise ValueError(
            f"{path} has no translation of {len(missing)} sentences, the first of them {missing[0]}"
        )
    return [best[number] for number in range(count)]
