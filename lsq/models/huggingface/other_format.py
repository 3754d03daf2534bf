"""Folders of transformers with lsq.safetensors: of one number format as of another."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

import lsq
from lsq import files
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.weight_masks import SUFFIX
from lsq.models.clip_state import clip_names, clip_state
from lsq.models.huggingface.clip_files import NAME
from lsq.models.other_format import CLIP, formats_of, load_other_format
from lsq.quant.pruning import Pruning

OF_TRAINING = (
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
)
"""What Trainer keeps in a checkpoint beside the model: of the format before, so that it is left
out."""
WAYS = ({}, {"fused": False}, {"tied": True}, {"fused": False, "tied": True})
"""Of lsq.convert, which a folder does not say."""


def convert_folder(folder: Path, output: Path, changes: Mapping[str, Any]) -> tuple[int, bool]:
    """Write `folder` to `output`, with clips for other values of fields of QuantConfig, whole or
    not at all.

    Files of the model are copied. The state of a training by Trainer is left out.

    Returns:
        How many weights have clips, all of which were measured anew; whether the next pass measures
        those of activations.

    Raises:
        ValueError: there is no lsq.safetensors, or it is damaged, has these values already, or
            clips of other layers than lsq.convert makes.
        OSError: the model cannot be read, or the folder not be written.
    """
    state = _read(folder / NAME)
    quant = _wanted(state, changes, folder)
    model = _model(folder, state, quant)
    clips = clip_state(model).keys()
    due = load_other_format(model, state, clips)
    content = save(clip_state(model), {"format": "pt"})

    def make(new: Path) -> None:
        left_out = {path.name for pattern in OF_TRAINING for path in folder.glob(pattern)}
        for path in folder.iterdir():
            if path.is_file() and path.name not in left_out and path.name != NAME:
                shutil.copy2(path, new / path.name)
        files.write(new / NAME, lambda file: file.write(content))

    files.write_folder(output, make)
    return sum(name.endswith("weight_clip") for name in clips), due


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{path.parent} has nothing to convert: there is no {NAME}, in which LsqCallback and "
            "lsq.models.huggingface.save_clips keep clips, and no model/checkpoint_best.pt of lsq"
            " train-text"
        ) from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _wanted(
    state: Mapping[str, torch.Tensor], changes: Mapping[str, Any], folder: Path
) -> QuantConfig:
    """What the clips were learned with, with other values; what a folder does not say is as by
    default."""
    end = clip_format.NAME
    found = [
        clip_format.read(value, name)
        for name, value in state.items()
        if name.rpartition(".")[2] == end
    ]
    old = {name: {one[name] for one in found} for name in clip_format.FIELDS} if found else {}
    mixed = [name for name, values in old.items() if len(values) > 1 and name not in changes]
    if mixed:
        raise ValueError(
            f"layers in {folder} have different {mixed[0]}"
            f" ({', '.join(map(repr, sorted(old[mixed[0]])))}); give "
            f"{clip_format.option(mixed[0])}, for all of them"
        )
    said = {name: value for name, value in changes.items() if name in clip_format.FIELDS}
    if not said:
        raise ValueError(
            f"{folder} says nothing of {', '.join(changes)}; give that to lsq.convert alone"
        )
    if found and all(old[name] == {value} for name, value in said.items()):
        raise ValueError(f"{folder} has {', '.join(f'{k}={v!r}' for k, v in said.items())} already")
    sparsity = Pruning().pattern if any(name.endswith(SUFFIX) for name in state) else ""
    return QuantConfig(
        **{name: next(iter(values)) for name, values in old.items()} | dict(changes),
        sparsity=sparsity,
    )


def _model(folder: Path, state: Mapping[str, torch.Tensor], quant: QuantConfig) -> nn.Module:
    """The model in `folder`, converted as the one was whose clips these are."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    model = kind.from_pretrained(folder, local_files_only=True)
    refused: ValueError | None = None
    for way in WAYS:
        try:
            lsq.convert(model, quant, **way)
        except ValueError as error:  # formats may fit other layers than whole ones
            refused = refused or error
            continue
        # as their formats have them
        clips = {name for name in clip_names(model) | state.keys() if name.endswith(CLIP)}
        if not (clip_names(model) ^ state.keys()) - formats_of(model).keys() - clips:
            return model
        lsq.revert(model)
    raise refused or ValueError(
        f"{folder / NAME} has clips of other layers than lsq.convert makes by itself; in Python,"
        " convert the model "
        f"with your options and QuantConfig(**{clip_format.fields_of(quant)}), then "
        "lsq.models.huggingface.load_clips(model, folder, other_format=True) and save_clips(model,"
        " other"
        " folder)"
    )
