"""Checkpoints of one number format as those of another, to go on training from or to translate
with."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor, nn

from lsq.fairseq import architectures, checkpoint, options
from lsq.layers import ProgramModule
from lsq.models.other_format import load_other_format
from lsq.program.parameters import Kind


@dataclass(frozen=True, kw_only=True, eq=False)
class Converted:
    """A checkpoint in another format."""

    state: dict[str, Any]
    """As fairseq keeps it in a file."""
    weights: int
    """Clips of so many weights were measured anew."""
    activations_due: bool
    """Whether the next pass measures the clips of activations; else they are what they were."""
    optimizer: str
    """What became of the optimizer's state; where it is kept, moments of the clips that were
    measured begin at zero."""


def converted(path: Path, changes: Mapping[str, Any]) -> Converted:
    """The checkpoint of fairseq at `path` with other values of fields of QuantConfig.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is damaged, of another model than lsq's, or of a float one; or has these
            values already; or a value is not allowed.
    """
    tensors = checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]  # after a look for damage
    state = torch.load(path, map_location="cpu")  # as it is in the file
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
            " --lsq-from, or `lsq export "
            "--to fairseq` it"
        )
    if all(getattr(old, field) == value for field, value in changes.items()):
        asked = ", ".join(f"{field}={value!r}" for field, value in changes.items())
        raise ValueError(f"{path} has {asked} already; nothing is written")
    after = {**before, **{options.PREFIX + field: value for field, value in changes.items()}}
    model = _build(Namespace(**after), tensors)
    due = load_other_format(model, tensors, model.state_dict().keys())
    shapes = {key: value.shape for key, value in tensors.items()}
    state["model"] = type(state["model"])(model.state_dict())
    for field in changes:
        _set(stored, options.PREFIX + field, after[options.PREFIX + field])
    learned = checkpoint.quantization(after).learned
    optimizer = _convert_optimizer(state, model, shapes, same_parameters=old.learned == learned)
    return Converted(
        state=state, weights=len(_clips(model)), activations_due=due, optimizer=optimizer
    )


def _set(stored: Any, name: str, value: Any) -> None:
    if isinstance(stored, Namespace):
        setattr(stored, name, value)
    else:
        stored[name] = value


def _build(args: Namespace, state: Mapping[str, Tensor]) -> nn.Module:
    """The model of a checkpoint, whose words do not matter."""
    tables = {side: state.get(f"{side}.embed_tokens.weight") for side in ("encoder", "decoder")}
    source, target = (_words(table) for table in (tables["encoder"], tables["decoder"]))
    task = SimpleNamespace(source_dictionary=source or target, target_dictionary=target)
    args.lsq_from = None
    name = args.arch if hasattr(args, "arch") else args._name
    return architectures.model_of(name).build_model(args, task)


def _words(table: Tensor | None) -> Dictionary | None:
    if table is None:
        return None
    words = Dictionary()
    for number in range(len(table) - len(words)):
        words.add_symbol(f"{number}")
    return words


def _clips(model: nn.Module) -> set[str]:
    """Names of the clips of weights."""
    return {
        f"{prefix}.{module.state_name(name)}"
        for prefix, module in model.named_modules()
        if isinstance(module, ProgramModule)
        for name in module.clips()
        if module.declared[name].kind is Kind.WEIGHT_CLIP
    }


def _convert_optimizer(
    state: dict[str, Any],
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    *,
    same_parameters: bool,
) -> str:
    """Let moments of clips that were measured anew begin at zero, or leave all of the optimizer's
    state out.

    `same_parameters`: clips learn in both formats, or in neither.

    Returns:
        What was done.
    """
    kept = state.get("last_optimizer_state")
    if not kept:
        return "it holds no optimizer's state"
    parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    moments = kept.get("state", {})
    changed = [name for name, one in parameters if shapes.get(name) != one.shape]
    if not same_parameters:
        reason = "clips learn in one of the formats alone"
    elif changed:
        reason = f"{changed[0]} has another shape"
    elif moments.keys() - set(range(len(parameters))):
        reason = f"it is of {len(moments)} parameters, and the model has {len(parameters)}"
    else:
        fresh = _clips(model)
        for number, (name, _) in enumerate(parameters):
            if name in fresh:
                for value in moments.get(number, {}).values():
                    if isinstance(value, Tensor) and value.dim():
                        value.zero_()
        return "the optimizer's state is kept"
    state["last_optimizer_state"] = None
    return (
        f"the optimizer's state is left out ({reason}): a training goes on with --reset-optimizer"
    )
