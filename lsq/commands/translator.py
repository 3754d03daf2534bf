"""`lsq.Translator`, which loads a run, a checkpoint or an exported file, and the options of `lsq
translate` and `lsq serve` for model and search."""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Annotated

import torch

from lsq import extras
from lsq.commands import logs, run_files
from lsq.commands.options import AnyPath, Count, File, Folder
from lsq.config import documentation
from lsq.files import check_name
from lsq.run.backends import Backend, backend
from lsq.serving import model_file
from lsq.serving.architecture import check_codes
from lsq.serving.search_options import SearchOptions
from lsq.serving.subwords import Subwords, processor_of
from lsq.serving.translator import (
    BATCH_TOKENS,
    DEVICES,
    LONG_LINES,
    TextTranslator,
    TranslationModel,
    backend_of,
    check_settings,
    longest_source,
    read_exported,
    stamp_of,
)


class Translator(TextTranslator):
    """Translates text with a trained model, in any thread.

    Args:
        path: a run of `lsq train-text`, its output folder with one run, a file of `lsq export`, or
            a checkpoint.
        data: folder of a checkpoint's dictionaries.
        sentencepiece_model: sentencepiece's model of a checkpoint; without it, lines are words of
            its dictionaries.
        batch_tokens, long_lines: see `TextTranslator`.
        device: where it computes: "cpu"; "cuda", a GPU; "emulator", a GPU's kernels on the CPU, for
            tests.

    Raises:
        FileNotFoundError: there is no such file.
        MissingPackage: the file is of fairseq, which is not installed.
        ValueError: a file is damaged or of another kind; batch_tokens is below 1; device or
            long_lines is unknown; or the device does not work here or for this model.
    """

    def __init__(
        self,
        path: str | PathLike,
        *,
        data: str | PathLike | None = None,
        sentencepiece_model: str | PathLike | None = None,
        batch_tokens: int = BATCH_TOKENS,
        long_lines: str = "cut",
        device: str = "cpu",
    ):
        check_settings(batch_tokens, long_lines)
        data, subwords = (given and Path(given) for given in (data, sentencepiece_model))
        model = load(Path(path), data, subwords, backend_of(device))
        super().__init__(model, batch_tokens=batch_tokens, long_lines=long_lines)


def load(
    path: Path,
    data: Path | None = None,
    sentencepiece_model: Path | None = None,
    device: Backend | None = None,
) -> TranslationModel:
    """Load a model for a `Translator` on a backend (None: the CPU); raises as `Translator` does."""
    device = device or backend("cpu")
    check_name(path)
    if path.is_file() and model_file.is_model_file(path):
        if data is not None or sentencepiece_model is not None:
            raise ValueError(
                f"{path} has its words in it; leave --data and --sentencepiece-model out"
            )
        return read_exported(path, device)
    return _read_trained(run_files.find(path, data, sentencepiece_model), device)


def _read_trained(files: run_files.Source, device: Backend) -> TranslationModel:
    logs.configure()
    try:
        from lsq.fairseq.checkpoint import options_in, quantization
        from lsq.fairseq.generator import steps_of, words_of  # imports fairseq: takes seconds
    except ModuleNotFoundError as error:
        raise extras.MissingPackage(
            f"{files.checkpoint} needs {extras.explanation(error.name or '')}; what `lsq export"
            " --to lsq` makes of it needs none"
        ) from error

    if device is not backend("cpu"):
        try:
            check_codes(quantization(options_in(files.checkpoint, "model")))
        except ValueError as error:
            raise ValueError(
                f"{files.checkpoint} is translated on the CPU alone: {error}"
            ) from None
    stamp = stamp_of(files.checkpoint)
    found = run_files.load(files)
    if found.source is None:
        raise ValueError(
            f"{files.checkpoint} is a language model; it does not translate (see `lsq generate`)"
        )
    source, target = words_of(found.source), words_of(found.target)
    return TranslationModel(
        file=files.checkpoint,
        stamp=stamp,
        steps=steps_of([found.model], device),
        subwords=Subwords(source, target, files.subwords and processor_of(files.subwords)),
        longest_source=longest_source(found.model.max_positions()[0], found.trained_length),
        options=found.search,
    )


class ModelOptions(Namespace):
    """model"""

    model: AnyPath
    """a run of `lsq train-text` (runs/mine/int8, or runs/mine with one run in it), a file of `lsq
    export --to lsq`, or a checkpoint with --data and --sentencepiece-model"""
    data: Folder | None = None
    """folder of a checkpoint's dict.*.txt"""
    sentencepiece_model: File | None = None
    """sentencepiece model of a checkpoint; without it, lines are words of its dictionaries with
    spaces between them"""
    device: Annotated[str, tuple(DEVICES)] = "cpu"
    """where it computes; emulator: a GPU's kernels on the CPU, for tests, very slow"""
    threads: Count | None = None
    """threads on the CPU (default: as PyTorch chooses)"""
    batch_tokens: Count = BATCH_TOKENS
    """most words of sentences in a batch; hypotheses are limited in proportion"""
    long_lines: Annotated[str, tuple(LONG_LINES)] = "cut"
    """treatment of lines that are too long for the model: cut translates them in parts, skip leaves
    them empty, copy copies them as they are, refuse ends with an error"""


def add_search(parser: ArgumentParser) -> None:
    """Add an option for every field of SearchOptions; the namespace only has the given ones."""
    search = parser.add_argument_group("search", argument_default=SUPPRESS)
    texts = documentation(SearchOptions)
    for field in fields(SearchOptions):
        option, text = "--" + field.name.replace("_", "-"), texts[field.name].replace("%", "%%")
        if field.name == "normalize_scores":
            shown = {"dest": field.name, "action": "store_false", "help": "Scores are sums."}
            search.add_argument("--unnormalized", **shown)
        elif field.type is bool:
            search.add_argument(option, action="store_true", help=text)
        else:
            of_run = field.name in ("beam", "max_len_b")
            default = "as the run translated its test set" if of_run else field.default
            text = f"{text or 'See --max-len-b.'} Default: {default}."
            search.add_argument(option, type=field.type, help=text)


def translator_of(given: Namespace) -> Translator:
    cores = os.cpu_count() or 1
    if given.threads is not None:
        if given.threads > cores:
            raise ValueError(
                f"--threads is {given.threads}, and this machine has {cores} cores; give {cores} at"
                " most"
            )
        torch.set_num_threads(given.threads)
    return Translator(
        given.model,
        data=given.data,
        sentencepiece_model=given.sentencepiece_model,
        batch_tokens=given.batch_tokens,
        long_lines=given.long_lines,
        device=given.device,
    )


def search_options(given: Namespace, defaults: SearchOptions) -> SearchOptions:
    values = vars(given)
    chosen = {
        field.name: values[field.name] for field in fields(SearchOptions) if field.name in values
    }
    return replace(defaults, **chosen)
