"""Tensors by name from the files that models are kept in."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lsq import extras
from lsq.files import loading_fault
from lsq.serving import model_file

STATES = ("model", "state_dict", "model_state_dict")
"""Names under which a checkpoint holds its model, beside the state of an optimizer and others."""
PARTS = ("*.safetensors", "pytorch_model*.bin")
"""transformers' names of the files of a model in a folder; the first that is there."""


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name; codes of an exported model become the floats that they
    stand for.

    Args:
        path: a file of safetensors, of `lsq export --to lsq` or of torch.save, from which only
            plain data and types of fairseq's checkpoints are loaded; or a folder of transformers'
            with such files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, empty or another file, or has types in it that are not safe to
            load.
    """
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
        return _decoded(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no file of safetensors: {error}") from None


def _decoded(path: Path) -> dict[str, Tensor]:
    """Read the tensors of an exported model; rows of packed codes are filled up with zeros."""
    model = model_file.read(path).model
    tensors = {}
    for name, tensor in model.tensors.items():
        weight = name.removesuffix(".codes")
        if weight != name:
            codes, scale = (
                model.codes(weight, 2 * tensor.shape[1]),
                model.tensors[weight + ".scale"],
            )
            tensors[weight] = codes * scale[:, None]
        elif not name.endswith(".scale"):
            tensors[name] = tensor
    return tensors


def _of_torch(path: Path) -> object:
    options = {"map_location": "cpu", "weights_only": True, "mmap": is_zipfile(path)}
    try:
        return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        refused = error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None
    try:
        from lsq.fairseq.compatibility import checkpoints  # takes seconds

        checkpoints.register_types()
        return torch.load(path, **options)
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} holds types that are not loaded without knowing them; if it is a checkpoint of"
            f" fairseq's, install that: {extras.command('fairseq')}"
        ) from None
    except Exception:  # whatever is in the file decides what fails
        raise _damaged(path, refused) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is damaged, or no file of tensors that is safe to load: {loading_fault(error)};"
        " save the state dict of the model by itself, best with safetensors"
    )


def _state(content: object) -> object:
    """Find the model in a checkpoint."""
    for name in STATES:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            return _state(content[name])
    return content


def _named(content: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, with the names of these before theirs."""
    if isinstance(content, Tensor):
        yield name or "tensor", content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
