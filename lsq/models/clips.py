"""Clips of a converted model: save, load, average, and load into another number format."""

import gc
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lsq import files, quant
from lsq.config import require_model
from lsq.layers import clip_format
from lsq.layers.module import ProgramModule
from lsq.layers.schedule import Schedule, renamed
from lsq.program.tensor import Kind
from lsq.run import shards

logger = logging.getLogger(__name__)
NAME = "lsq.safetensors"
CLIP = "_clip"
ACTIVATION_FIELDS = ("activation_format", "bits")
"""Fields of clip_format.FIELDS on which clips of activations depend."""


def save_clips(model: nn.Module, folder: str | os.PathLike) -> Path:
    """Write the clips of a converted `model` to lsq.safetensors in `folder`, whole or not at all.

    Call it beside `model.save_pretrained(folder)`, whose files hold weights alone. Returns the
    file. Raises ValueError if the model is not converted, or sharded by FSDP2.
    """
    content = save(clip_state(model), {"format": "pt"})
    path = Path(folder) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, lambda file: file.write(content))
    return path


def load_clips(model: nn.Module, folder: str | os.PathLike, *, other_format: bool = False) -> None:
    """Load the clips that `save_clips` wrote into a converted `model`, after its weights.

    `other_format`: allow clips of another number format, see `load_clip_state`. Raises
    FileNotFoundError if there is no file, and ValueError if it is damaged, or of another format or
    conversion.
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


def declare_formats(source: Mapping[str, torch.Tensor] | str | os.PathLike) -> None:
    """Declare the number formats of users with which a checkpoint was trained, so that a model can
    be made in them before it loads the checkpoint.

    Args:
        source: a state dict, its file (of safetensors or torch.save), or a folder with the
            lsq.safetensors of `save_clips`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, it is of no converted model, or a format of that name is declared
            here with other values.
    """
    state = source if isinstance(source, Mapping) else _read_state(Path(source))
    if not clip_format.declare_numbers(state):
        raise ValueError(
            f"no entry of {'the state dict' if state is source else source} ends in"
            f" {clip_format.NAME}, as those of converted models do; give such a state dict, its"
            f" file, or the folder of {NAME}"
        )


def _read_state(path: Path) -> Mapping[str, torch.Tensor]:
    path = path / NAME if path.is_dir() else path
    try:
        if path.suffix == Path(NAME).suffix:
            return load(path.read_bytes())
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} holds no state dict: {files.loading_fault(error)}") from None


def _hint(folder: Path) -> str:
    if folder.name == NAME:
        return "give the folder that it is in"
    if not folder.is_dir():
        return f"{folder} is no folder on this machine"
    return (
        "lsq.models.save_clips(model, folder) writes it, and so does LsqCallback to each"
        " checkpoint; without it, the converted model measures its clips in the next pass"
    )


def average_clips(model: nn.Module, group: ProcessGroup | None = None) -> RemovableHandle:
    """Let workers agree on measured clips of `model` before optimizers step.

    Learned clips become the mean of all workers, clips that follow activations the largest. Call it
    in every process; DistributedDataParallel and FSDP2 need no call. Between measurements, shared
    gradients keep learned clips equal. `remove()` of the result ends it.

    Args:
        model: converted, and not wrapped.
        group: of the workers; None: all processes.

    Raises:
        ValueError: there is no process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "there is one process; average_clips is for several, after init_process_group"
        )
    from lsq.dist import replicas  # late, since a single process does not need it

    return replicas.share(model, group)


def clip_names(model: nn.Module) -> set[str]:
    """Return the names that conversion adds to the state dict of `model`: clips, formats, masks,
    widths of nodes."""
    require_model(model)
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ProgramModule)
        for name in (
            *map(module.state_name, module.clips()),
            *Schedule.NAMES,
            clip_format.NAME,
            *module.other_names(),
        )
    }


def clip_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the entries `clip_names` as copies on the CPU; ValueError for none, or shards."""
    names = _names(model, "there are no clips")
    state = {name: value.detach() for name, value in model.state_dict().items() if name in names}
    if any(map(shards.is_shard, state.values())):
        raise ValueError(
            "clips are shards of FSDP2; save them by torch.distributed.checkpoint, with the weights"
        )
    return {
        name: value.cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }


def load_clip_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, other_format: bool = False
) -> None:
    """Load a `clip_state` into the converted layers of `model`.

    `other_format`: allow clips of another number format, see `load_other_format`. Raises ValueError
    if the model is not converted, the state has other layers, shapes or (without `other_format`)
    formats, or a clip cannot be used; then nothing is loaded.
    """
    own, state = model.state_dict(), renamed(state)
    names = _names(model, "no clips can be loaded")
    if other_format:
        load_other_format(model, state, names)
        return
    formats = formats_of(model)
    for name, ours in formats.items():
        theirs = clip_format.stored(state.get(name), name, ours)
        clip_format.check(theirs, ours, name.removesuffix(clip_format.NAME))
    own = {name: value for name, value in own.items() if name in names}  # masks, in float mode
    _check(model, own, state, own.keys() - formats.keys())
    model.load_state_dict(state, strict=False)


def _names(model: nn.Module, outcome: str) -> set[str]:
    names = clip_names(model)
    if not names:
        raise ValueError(
            f"no layer of this {type(model).__name__} is lsq's, so {outcome}; call"
            " lsq.convert(model)"
        )
    return names


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Clips that a model measures anew after it has loaded clips of another format."""

    weights: frozenset[str]
    """Names of the clips of weights, which have been measured anew."""
    activations_due: bool
    """Whether the next pass measures clips of activations; False: they were kept."""

    def __str__(self) -> str:
        due = "are measured in the next pass, a training's: nothing is translated before"
        activations = due if self.activations_due else "are kept"
        weights = (
            f"clips of {len(self.weights)} weights are measured anew"
            if self.weights
            else "no weight has a clip in this format"
        )
        return f"{weights}, those of activations {activations}"


def refuse_same(checkpoint: object, changes: Mapping[str, Any]) -> None:
    """Raise the ValueError for a checkpoint that has the values in `changes` already."""
    fields = ", ".join(f"{field}={value!r}" for field, value in changes.items())
    raise ValueError(f"{checkpoint} has {fields} already; nothing is written")


def formats_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Map the entries for formats in the state dict of `model` to their fields of QuantConfig."""
    return {
        prefix + clip_format.NAME: clip_format.fields_of(module.quant)
        for prefix, module in _rounding(model)
    }


def load_other_format(
    model: nn.Module, state: Mapping[str, torch.Tensor], wanted: Collection[str]
) -> Measured:
    """Load a state dict with clips of any format into `model`.

    Clips of weights are measured anew. Clips of activations are kept, or measured in the next pass
    if their format differs. `wanted`: names that the state must hold; clips of weights and formats
    may be missing. Raises ValueError if names or shapes do not fit, a kept clip cannot be used, or
    clip_init="fixed" forbids to measure a clip; then nothing is loaded.
    """
    own, kept, optional = model.state_dict(), dict(state), set()
    activations_due, measured = False, set()
    for prefix, module in _rounding(model):
        ours = clip_format.fields_of(module.quant)
        entry = prefix + clip_format.NAME
        theirs = clip_format.stored(kept.get(entry), entry, ours)
        optional.add(prefix + "float_fallback")  # earlier versions do not have it
        if theirs != ours:  # formats that do not round have no clips
            ending = [name for name in kept if name.startswith(prefix) and name.endswith(CLIP)]
            kept = {
                name: value for name, value in kept.items() if name not in ending or name in own
            }
        clips = {
            prefix + module.state_name(name): module.declared[name].kind for name in module.clips()
        }
        of_weights = [name for name, kind in clips.items() if kind is Kind.WEIGHT_CLIP]
        of_activations = []
        if any(theirs.get(field) != ours.get(field) for field in ACTIVATION_FIELDS):
            of_activations = [name for name, kind in clips.items() if kind is Kind.ACTIVATION_CLIP]
        due = [*of_weights, *of_activations]
        if due and module.quant.clip_init == "fixed":
            raise ValueError(
                f"{due[0]} must be measured for the new format, but clip_init is 'fixed', under"
                f" which nothing is measured: add {clip_format.option('clip_init')} mse, in Python"
                " QuantConfig(clip_init='mse')"
            )
        # placeholders until they are measured
        kept |= {name: own[name] for name in (entry, *due)}
        measured.update(of_weights)
        if of_activations and prefix + "calibrated" in kept:
            kept[prefix + "calibrated"] = torch.tensor(False)
            activations_due = True
    _check(model, own, kept, set(wanted) - optional)
    nn.Module.load_state_dict(model, kept, strict=False)
    for _, module in _rounding(model):
        module.calibrate_weights()
    return Measured(weights=frozenset(measured), activations_due=activations_due)


def _rounding(model: nn.Module) -> Iterator[tuple[str, ProgramModule]]:
    """Yield (prefix of its names, module) for each module whose clips have a format."""
    for path, module in model.named_modules():
        if isinstance(module, ProgramModule) and module.quant.quantized:
            yield f"{path}." if path else "", module


def _check(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
    wanted: Collection[str],
) -> None:
    there, here = (
        {name: list(one.shape) for name, one in values.items()} for values in (kept, own)
    )
    problems = [name for name in kept.keys() | wanted if there.get(name) != here.get(name)]
    if problems:
        name = min(problems)
        raise ValueError(
            f"the checkpoint does not fit this model in {len(problems)} tensors, first {name}: "
            f"{there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')} here;"
            " make the model with the options that it was trained with, apart from formats"
        )
    for prefix, module in _rounding(model):
        for name in {prefix + module.state_name(clip) for clip in module.clips()} & kept.keys():
            quant.check_clip(kept[name], name)


def keep_apart(model: nn.Module, *, apart: bool = True) -> None:
    """Let `save_pretrained` of models in `model` leave clips out; not `apart`: save them again."""
    for module in model.modules():
        if hasattr(type(module), "_keys_to_ignore_on_save"):
            own = clip_names(module)
            # names after PEFT has merged adapters
            own |= {name.replace(".base_layer.", ".") for name in own}
            left = set(module._keys_to_ignore_on_save or ()) - own
            module._keys_to_ignore_on_save = left | own if apart else left


def warn_of_optimizers(model: nn.Module) -> None:
    """Warn if an optimizer has parameters of `model` already: it will not train clips."""
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    for one in gc.get_objects() if own else ():
        if issubclass(type(one), Optimizer) and hasattr(one, "param_groups"):
            groups = [group["params"] for group in one.param_groups]
            if any(id(parameter) in own for group in groups for parameter in group):
                logger.warning(
                    "an optimizer of this %s was made before lsq.convert, so that clips do not"
                    " learn; make the optimizer, or the Trainer, afterwards",
                    type(model).__name__,
                )
                return
