"""Conversion of folders of transformers to another number format.

Imported before transformers, it hides a broken torchaudio: transformers then works without it.
"""

import shutil
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from lsq import files
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.weight_masks import SUFFIX
from lsq.models.clips import (
    CLIP,
    NAME,
    Measured,
    clip_names,
    clip_state,
    formats_of,
    load_other_format,
    refuse_same,
)
from lsq.models.conversion import convert, revert
from lsq.quant.pruning import Pruning

OF_TRAINING = (
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
)
"""Files of a Trainer's training in the old format, which are not copied."""
CONVERT_OPTIONS = ({}, {"fused": False}, {"tied": True}, {"fused": False, "tied": True})
"""Options of lsq.convert to try one after another, since a folder does not record them."""


def keep_broken_torchaudio_out() -> None:
    """Hide a torchaudio that cannot be loaded, since transformers would import it."""
    loaded = {"transformers", "torchaudio"} & sys.modules.keys()
    if not loaded and util.find_spec("transformers") and util.find_spec("torchaudio"):
        try:
            import_module("torchaudio")
        except (ImportError, OSError) as error:
            sys.modules["torchaudio"] = None
            warnings.warn(
                "torchaudio is installed but cannot be loaded"
                f" ({str(error).partition(chr(10))[0][:100]}); it is left out, so that transformers"
                " works without it",
                stacklevel=3,
            )


keep_broken_torchaudio_out()


def convert_folder(folder: Path, output: Path, changes: Mapping[str, Any]) -> Measured:
    """Write `folder` to `output` with clips for the fields `changes` of QuantConfig.

    `output` is written whole or not at all, without the state of a Trainer's training. Raises
    ValueError if lsq.safetensors is missing or damaged, has these values already, or has clips of
    other layers than lsq.convert makes.
    """
    state = _read(folder / NAME)
    model = _model(folder, state, _quantization(state, changes, folder))
    measured = load_other_format(model, state, clip_state(model).keys())
    content = save(clip_state(model), {"format": "pt"})

    def make(new: Path) -> None:
        left_out = {path for pattern in (NAME, *OF_TRAINING) for path in folder.glob(pattern)}
        for path in folder.iterdir():
            if path.is_file() and path not in left_out:
                shutil.copy2(path, new / path.name)
        files.write(new / NAME, lambda file: file.write(content))

    files.write_folder(output, make)
    return measured


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{path.parent} has nothing to convert: there is no {NAME}, in which LsqCallback and"
            " lsq.models.save_clips keep clips, and no model/checkpoint_best.pt of lsq train-text"
        ) from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _quantization(
    state: Mapping[str, torch.Tensor], changes: Mapping[str, Any], folder: Path
) -> QuantConfig:
    """Return the clips' format with `changes`; a field that a folder lacks has its default."""
    formats = [
        clip_format.read(value, name)
        for name, value in state.items()
        if name.rpartition(".")[2] == clip_format.NAME
    ]
    fields = clip_format.FIELDS if formats else ()
    old = {field: {one[field] for one in formats} for field in fields}
    mixed = [field for field, values in old.items() if len(values) > 1 and field not in changes]
    if mixed:
        values = ", ".join(map(repr, sorted(old[mixed[0]])))
        raise ValueError(
            f"layers in {folder} have different {mixed[0]} ({values}); give"
            f" {clip_format.option(mixed[0])}, for all of them"
        )
    changed = {field: value for field, value in changes.items() if field in clip_format.FIELDS}
    if not changed:
        raise ValueError(
            f"{folder} says nothing of {', '.join(changes)}; give that to lsq.convert alone"
        )
    if formats and all(old[field] == {value} for field, value in changed.items()):
        refuse_same(folder, changed)
    sparsity = Pruning().pattern if any(name.endswith(SUFFIX) for name in state) else ""
    values = {field: next(iter(values)) for field, values in old.items()} | dict(changes)
    return QuantConfig(**values, sparsity=sparsity)


def _model(folder: Path, state: Mapping[str, torch.Tensor], quant: QuantConfig) -> nn.Module:
    """Return the model in `folder`, converted so that it has the clips in `state`."""
    transformers = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    model = kind.from_pretrained(folder, local_files_only=True)
    refused: ValueError | None = None
    for options in CONVERT_OPTIONS:
        try:
            convert(model, quant, **options)
        except ValueError as error:  # patterns of formats may fit only unfused layers
            refused = refused or error
            continue
        # formats decide which clips there are
        clips = {name for name in clip_names(model) | state.keys() if name.endswith(CLIP)}
        if not (clip_names(model) ^ state.keys()) - formats_of(model).keys() - clips:
            return model
        revert(model)
    raise refused or ValueError(
        f"{folder / NAME} has clips of other layers than lsq.convert makes by itself; in Python,"
        " convert the model with your options and"
        f" QuantConfig(**{clip_format.fields_of(quant)}), then lsq.models.load_clips(model, folder,"
        " other_format=True) and save_clips(model, other folder)"
    )
