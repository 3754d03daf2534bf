"""lsq.safetensors: the clips of a converted model, beside the weights that every program can
read."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from lsq import files
from lsq.models.clip_state import clip_state, load_clip_state

NAME = "lsq.safetensors"


def save_clips(model: nn.Module, folder: str | os.PathLike) -> Path:
    """Write the clips of a converted `model` to lsq.safetensors in `folder`, which is made: whole
    or not at all.

    Call it beside `model.save_pretrained(folder)`, whose files hold the weights alone.

    Returns:
        The file.

    Raises:
        ValueError: the model is not converted, or sharded by FSDP2.
        OSError: it cannot be written.
    """
    content = save(clip_state(model), {"format": "pt"})
    path = Path(folder) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, lambda file: file.write(content))
    return path


def load_clips(model: nn.Module, folder: str | os.PathLike, *, other_format: bool = False) -> None:
    """Let a converted `model` go on with the clips that `save_clips` wrote to `folder`.

    Load its weights before.

    Args:
        other_format: they may be of a model of another number format. Clips of weights are then
            measured anew, and those of activations in the next pass, where their format is another
            one, too.

    Raises:
        FileNotFoundError: there is no lsq.safetensors.
        ValueError: it is damaged, of another format, or of a model that was converted with other
            options; or the model is not converted.
    """
    path = Path(folder) / NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} is not there: {_hint(path.parent)}") from error
    try:
        load_clip_state(model, load(content), other_format=other_format)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _hint(folder: Path) -> str:
    if folder.name == NAME:
        return "give the folder that it is in"
    if not folder.is_dir():
        return f"{folder} is no folder on this machine"
    return (
        "lsq.models.huggingface.save_clips(model, folder) writes it, and so does LsqCallback to"
        " each"
        " checkpoint; without it, "
        "the converted model measures its clips in the next pass"
    )
