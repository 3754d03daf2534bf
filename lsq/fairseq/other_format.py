"""Conversion of checkpoints to other number formats, to train on with or to translate with."""

from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from torch import Tensor, nn

from lsq.fairseq import architectures, checkpoint, options
from lsq.fairseq.memory import made_up_dictionary
from lsq.models.clips import Measured, load_other_format, refuse_same


class Converted(NamedTuple):
    """A checkpoint in another format, as fairseq keeps it in a file."""

    state: dict[str, Any]
    measured: Measured
    optimizer: str
    """A sentence on the optimizer's state: kept, or why it is not."""


def converted(path: Path, changes: Mapping[str, Any]) -> Converted:
    """Convert a checkpoint to other values of fields of QuantConfig; ValueError if it is damaged,
    of a float model, not of lsq, or has these values already."""
    tensors = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]  # checks for damage
    state = torch.load(path, map_location="cpu")  # unchanged by fairseq
    stored = checkpoint.options_of(state, "model")
    before = {**(stored if isinstance(stored, Mapping) else vars(stored))}
    name = str(before.get("arch") or before.get("_name") or "")
    if not architectures.is_ours(name):
        raise ValueError(
            f"{path} is of {name or 'an unknown model'}, and not of lsq; it has no number format"
        )
    old = checkpoint.quantization(before)
    if not old.quantized:
        raise ValueError(
            f"{path} is of a float model, which has no clips; train from its weights with"
            " --lsq-from, or `lsq export --to fairseq` it"
        )
    if all(getattr(old, field) == value for field, value in changes.items()):
        refuse_same(path, changes)
    changed = {options.PREFIX + field: value for field, value in changes.items()}
    after = {**before, **changed}
    model = _build(Namespace(**after), tensors)
    measured = load_other_format(model, tensors, model.state_dict().keys())
    shapes = {key: value.shape for key, value in tensors.items()}
    state["model"] = type(state["model"])(model.state_dict())
    for option, value in changed.items():
        if isinstance(stored, Namespace):
            setattr(stored, option, value)
        else:
            stored[option] = value
    obstacle = None
    if old.learned != checkpoint.quantization(after).learned:
        obstacle = "clips learn in one of the formats alone"
    optimizer = _convert_optimizer(state, model, shapes, measured.weights, obstacle)
    return Converted(state=state, measured=measured, optimizer=optimizer)


def _build(args: Namespace, state: Mapping[str, Tensor]) -> nn.Module:
    """Build the model of a checkpoint, with dictionaries of the right sizes."""
    tables = (state.get(f"{side}.embed_tokens.weight") for side in ("encoder", "decoder"))
    source, target = (None if one is None else made_up_dictionary(len(one)) for one in tables)
    task = SimpleNamespace(source_dictionary=source or target, target_dictionary=target)
    args.lsq_from = None
    name = args.arch if hasattr(args, "arch") else args._name
    return architectures.model_of(name).build_model(args, task)


def _convert_optimizer(
    state: dict[str, Any],
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    measured: Collection[str],
    obstacle: str | None,
) -> str:
    """Reset the moments of clips that were measured anew to zero, or drop the optimizer's state if
    there is an `obstacle` or a parameter is not as in `shapes`; return a sentence on it."""
    kept = state.get("last_optimizer_state")
    if not kept:
        return "it holds no optimizer's state"
    parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    moments = kept.get("state", {})
    changed = [name for name, one in parameters if shapes.get(name) != one.shape]
    if obstacle is None and changed:
        obstacle = f"{changed[0]} has another shape"
    elif obstacle is None and moments.keys() - set(range(len(parameters))):
        obstacle = f"it is of {len(moments)} parameters, and the model has {len(parameters)}"
    if obstacle is not None:
        state["last_optimizer_state"] = None
        return (
            f"the optimizer's state is left out ({obstacle}): a training goes on with"
            " --reset-optimizer"
        )
    for number, (name, _) in enumerate(parameters):
        if name in measured:
            for value in moments.get(number, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    value.zero_()
    return "the optimizer's state is kept"
