"""A training on codes as a folder: weights as their codes, clips, and the optimizer's state."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lsq import files
from lsq.layers.trained_codes import TrainedCodes
from lsq.run.shards import is_shard

NAME = "training.safetensors"
PARTS = ("codes", "remainder", "scale")
OF_OPTIMIZER = "optimizer/"
"""Begins the names of tensors of an optimizer's state."""


def save_codes(
    model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None = None
) -> Path:
    """Write a model of `train_codes`, and perhaps its optimizer, whole or not at all.

    A weight takes 1 or 2 bytes, without a float copy in memory. `save_pretrained` writes floats for
    others. Returns the file. Raises ValueError: no weight is codes, or the optimizer has parameters
    of another model.
    """
    tensors = dict(_tensors(model))
    metadata = {"format": "pt", "optimizer": "null"}
    if optimizer is not None:
        tensors |= _moments(model, optimizer)
        metadata["optimizer"] = json.dumps(_options(model, optimizer))
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.write_folder(folder, lambda made: save_file(tensors, made / NAME, metadata))
    return folder / NAME


@torch.no_grad()
def load_codes(
    model: nn.Module, folder: str | os.PathLike, optimizer: Optimizer | None = None
) -> None:
    """Load what `save_codes` wrote into a model of `train_codes`, so that training goes on bit by
    bit. Raises FileNotFoundError: there is no file; ValueError: it is damaged, or of another model
    or optimizer, and nothing is changed."""
    path = Path(folder) / NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; lsq.models.save_codes writes it")
    try:
        with safe_open(path, "pt") as file:
            options = json.loads((file.metadata() or {}).get("optimizer", "null"))
            _check(path, file, dict(_tensors(model)))
            if optimizer is not None:
                _check_options(path, options, model, optimizer)
                _check_moments(path, file, options)
            _fill(model, file)
            if optimizer is not None:
                _fill_optimizer(model, optimizer, file, options)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; take another checkpoint") from error


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors by name, each once, weights as their codes."""
    if any(map(is_shard, model.parameters())):
        raise ValueError(
            f"parameters of this {type(model).__name__} are shards of FSDP2;"
            " torch.distributed.checkpoint saves and loads them"
        )
    seen, coded = set(), False
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, TrainedCodes):
            coded = True
            for part, tensor in zip(PARTS, value.own, strict=True):
                if tensor is not None:
                    yield f"{name}.{part}", tensor
        else:
            yield name, value.detach().contiguous()
    if not coded:
        raise ValueError(
            f"no weight of this {type(model).__name__} is codes; call lsq.train_codes(model), or"
            " save the state dict of a float model"
        )


def _moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{OF_OPTIMIZER}{name}.{key}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _options(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the groups' names of parameters and options, and each parameter's plain numbers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        foreign = sum(parameter not in names for parameter in group["params"])
        if foreign:
            raise ValueError(
                f"{foreign} parameters of the optimizer are not of this {type(model).__name__};"
                " save the optimizer that trains it"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [names[one] for one in group["params"]], "options": options})
    numbers = {
        names[parameter]: {k: one for k, one in state.items() if not isinstance(one, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return {"groups": groups, "numbers": numbers}


def _check(path: Path, file: safe_open, wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a file has the tensors of a model."""
    found = {name for name in file.keys() if not name.startswith(OF_OPTIMIZER)}
    for names, what in ((wanted.keys() - found, "lacks"), (found - wanted.keys(), "also has")):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"{path} {what} {len(names)} tensors, such as {some}: it is of another model, or"
                " of other options of lsq.convert or lsq.train_codes"
            )
    for name, tensor in wanted.items():
        shape = file.get_slice(name).get_shape()
        if list(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {shape} in {path}, and {list(tensor.shape)} in the model; it is of"
                " another model"
            )


def _check_options(path: Path, options: Any, model: nn.Module, optimizer: Optimizer) -> None:
    if options is None:
        raise ValueError(f"{path} has no optimizer; save_codes(model, folder, optimizer) keeps it")
    own = [group["params"] for group in _options(model, optimizer)["groups"]]
    if own != [group["params"] for group in options["groups"]]:
        raise ValueError(
            f"the optimizer in {path} has other groups of parameters; make it as it was made for"
            " the training that was saved"
        )


def _check_moments(path: Path, file: safe_open, options: Mapping[str, Any]) -> None:
    found = {
        name.removeprefix(OF_OPTIMIZER).rpartition(".")[0]
        for name in file.keys()
        if name.startswith(OF_OPTIMIZER)
    }
    if missing := sorted(options["numbers"].keys() ^ found):
        raise ValueError(
            f"{path} is damaged: moments and steps are not of the same parameters, as of"
            f" {missing[0]}; take another checkpoint"
        )


def _fill(model: nn.Module, file: safe_open) -> None:
    seen, plain, own = set(), {}, set(file.keys())
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, TrainedCodes) and id(value) not in seen:
            for part, tensor in zip(PARTS, value.own, strict=True):
                if tensor is not None:
                    tensor.copy_(file.get_tensor(f"{name}.{part}"))
        elif name in own:
            plain[name] = file.get_tensor(name)
        seen.add(id(value))
    model.load_state_dict(plain, strict=False)


def _fill_optimizer(
    model: nn.Module, optimizer: Optimizer, file: safe_open, options: Mapping[str, Any]
) -> None:
    states: dict[str, dict[str, Any]] = options["numbers"]
    for key in file.keys():
        if key.startswith(OF_OPTIMIZER):
            name, _, moment = key.removeprefix(OF_OPTIMIZER).rpartition(".")
            states[name][moment] = file.get_tensor(key)
    numbers = {
        name: number
        for number, name in enumerate(
            name for group in options["groups"] for name in group["params"]
        )
    }
    groups = [
        {**group["options"], "params": [numbers[name] for name in group["params"]]}
        for group in options["groups"]
    ]
    optimizer.load_state_dict(
        {"state": {numbers[name]: one for name, one in states.items()}, "param_groups": groups}
    )
