"""`lsq formats`: measure the errors of number formats in the tensors of a model."""

import json
import pickle
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lsq import extras, files
from lsq.commands import interruption, logs, model_batch, run_files
from lsq.commands.model_batch import BatchOptions
from lsq.commands.options import (
    AnyPath,
    Count,
    Folder,
    check_there,
    command_parser,
    is_given,
    replaces,
)
from lsq.files import loading_fault
from lsq.files.lock import locked_folder
from lsq.quant.numbers import METHODS
from lsq.serving import model_file
from lsq.study import DEFAULT_FORMATS, Errors, draw, measure, measure_tensors
from lsq.study.tensors import LARGEST_SAMPLE

JSON, TABLE, PICTURE = OUTPUTS = ("formats.json", "formats.md", "formats.png")


class Options(BatchOptions):
    """Measure the error of number formats in real tensors: signal-to-noise in decibels (6 dB are a
    bit), the largest error, and bits per value with scales counted. From a checkpoint: of its
    weights. From a model and a batch of text: of its weights, of the inputs of its products
    (activations), and of the gradients of their outputs."""

    checkpoint: AnyPath | None = None
    """a file of safetensors, PyTorch or fairseq, a folder of transformers', or a run
    of `lsq train-text`: all float tensors with two dimensions or more"""
    model: AnyPath | None = None
    """a folder of transformers' (with --text), a run of `lsq train-text`, or a checkpoint of
    fairseq's with --data: weights, activations and gradients of a batch"""
    clip: Annotated[str, METHODS] = "absmax"
    """how clips are measured"""
    sample: Count = LARGEST_SAMPLE
    """most values of a tensor that are measured"""
    output: Folder | None = None
    """write formats.json, formats.md and formats.png into this folder"""
    overwrite: bool = False
    """replace these files"""
    words = 2048
    formats = list(DEFAULT_FORMATS)


def parser() -> ArgumentParser:
    return command_parser("formats", Options)


def run(arguments: list[str]) -> int:
    """Measure, print and write; ValueError for wrong options, or if nothing could be measured."""
    options = parser()
    given = options.parse_args(arguments)
    if (given.checkpoint is None) == (given.model is None):
        options.error("give one of --checkpoint and --model")
    check(given, is_given("--words", arguments))
    logs.quieten()
    output = given.output
    # all files come from one measurement
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


def check(given: Namespace, words: bool) -> None:
    """Raise ValueError for options that do not go together; `words`: whether --words is given."""
    of_model = {"--text": given.text, "--words": words, "--data": given.data}
    wrong = [option for option, value in of_model.items() if value]
    if given.checkpoint is not None and wrong:
        raise ValueError(
            f"{wrong[0]} goes with --model, by which a batch is computed; with --checkpoint leave"
            " it out"
        )
    check_there(given.checkpoint, given.model, *given.text)
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
    names = ("formats", "clip", "sample", "quiet")
    options = {name: getattr(given, name) for name in names}
    if given.checkpoint is not None:
        path = given.checkpoint  # a file, a folder of transformers', or a run
        if path.is_dir() and not any(part for pattern in PARTS for part in path.glob(pattern)):
            path = run_files.find(path).checkpoint
        tensors = tensors_in(path)
        errors = measure_tensors(tensors, chosen=given.tensors, **options)
        return errors, str(given.checkpoint)
    batch = model_batch.load(given)
    print(f"measuring {given.model}, {batch.description}")
    errors = measure(batch.model, batch.loss, tensors=given.tensors, **options)
    return errors, f"{given.model}, {batch.description}"


def write(errors: Errors, source: str, folder: Path) -> None:
    """Write OUTPUTS into a folder, each whole or not at all, the JSON last."""
    draw(errors, folder / PICTURE, f"Number formats: {source}")
    files.write_text(folder / TABLE, f"# Number formats: {source}\n\n{errors.table('github')}\n")
    content = json.dumps({"source": source, **errors.to_json()}, indent=1, allow_nan=False)
    files.write_text(folder / JSON, content + "\n")


# Tensors by name, from the files of a model

STATES = ("model", "state_dict", "model_state_dict")
"""Keys under which a checkpoint holds the state dict of its model."""
PARTS = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of weight files in a folder of transformers'; the first that matches counts."""


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return name -> tensor of a file or a folder of transformers'; ValueError if it is damaged."""
    if path.is_dir():
        parts = next(filter(None, (sorted(path.glob(pattern)) for pattern in PARTS)), [])
        if not parts:
            raise ValueError(
                f"{path} has no {' or '.join(PARTS)} in it; name a file, or the folder of a model"
            )
        return {name: tensor for part in parts for name, tensor in tensors_in(part).items()}
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    if not model_file.is_model_file(path):
        return dict(_named(_state(_of_torch(path))))
    if model_file.is_exported(path):
        raise ValueError(f"{path} is exported, so its weights are rounded; give the checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no file of safetensors: {error}") from None


def _of_torch(path: Path) -> object:
    options = {"map_location": "cpu", "weights_only": True, "mmap": is_zipfile(path)}
    try:
        return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        refused = error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None
    try:
        from lsq.fairseq.compatibility import checkpoints  # imports fairseq: seconds

        checkpoints.register_types()
        return torch.load(path, **options)
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} holds types that are not loaded without knowing them; if it is a checkpoint of"
            f" fairseq's, install that: {extras.command('fairseq')}"
        ) from None
    except Exception:  # a damaged file can raise anything
        raise _damaged(path, refused) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is damaged, or no file of tensors that is safe to load: {loading_fault(error)};"
        " save the state dict of the model by itself, best with safetensors"
    )


def _state(content: object) -> object:
    for name in STATES:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return _state(content[name])
    return content


def _named(content: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield name or "tensor", content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
