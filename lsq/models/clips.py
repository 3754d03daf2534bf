"""Clips of a converted model: by themselves, in lsq.safetensors, out of the checkpoints that others
read, and in optimizers."""

import difflib
import gc
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

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
from lsq.models.other_format import CLIP, formats_of, load_other_format
from lsq.observe import quantized_tensors
from lsq.run import shards
from lsq.run.parameter_state import steps

logger = logging.getLogger(__name__)
NAME = "lsq.safetensors"


def save_clips(model: nn.Module, folder: str | os.PathLike) -> Path:
    """Write the clips of a converted `model` to lsq.safetensors in `folder`, whole or not at all.

    Call it beside `model.save_pretrained(folder)`, whose files hold the weights alone. The folder
    is made if it does not exist.

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
        other_format: allow clips of another number format; see `load_clip_state`.

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
        "lsq.models.save_clips(model, folder) writes it, and so does LsqCallback to each"
        " checkpoint; without it, the converted model measures its clips in the next pass"
    )


def average_clips(model: nn.Module, group: ProcessGroup | None = None) -> RemovableHandle:
    """From now on, average the clips that training passes of `model` measure over the workers,
    before optimizers step.

    Under DistributedDataParallel and FSDP2 this happens by itself; call it in every process where
    something else makes gradients equal. Between measurements, the gradients that the workers share
    keep clips equal.

    Args:
        model: converted, and not wrapped.
        group: of the workers; None: all processes.

    Returns:
        Its `remove()` ends it.

    Raises:
        ValueError: there is no process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            "there is one process; average_clips is for several, after init_process_group"
        )
    from lsq.dist import replicas  # a single process loads none of it

    return replicas.share(model, group)


def clip_names(model: nn.Module) -> set[str]:
    """Return the names in the state dict of `model` that its float form does not have: clips, when
    they are measured, their format, masks of weights."""
    require_model(model)
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ProgramModule)
        for name in (
            *map(module.state_name, module.clips()),
            *Schedule.NAMES,
            clip_format.NAME,
            *module.mask_names(),
        )
    }


def clip_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return these entries as copies on the CPU: float32 [...] clips, float64 [], float32 [...]
    formats, float16 [...] masks.

    Raises:
        ValueError: there are none, or clips are shards of FSDP2, whose checkpoints have them.
    """
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
    """Let the converted layers of `model` go on with the clips of a `clip_state`; weights stay as
    they are.

    Args:
        other_format: allow clips of another number format. Clips of weights are then measured anew,
            on the weights that the model has; those of activations are kept, or measured in the
            next pass if their format differs as well.

    Raises:
        ValueError: the model is not converted, the state is of other layers or (without
            `other_format`) of another format, clips have other shapes, or one cannot be used.
            Nothing is loaded then.
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
    wanted = (names & own.keys()) - formats.keys()  # in float mode, masks alone
    lacking, strange = sorted(wanted - state.keys()), sorted(state.keys() - names)
    if lacking or strange:
        first_lacking, first_strange = (
            f", first {one[0]}" if one else "" for one in (lacking, strange)
        )
        near = difflib.get_close_matches((lacking or strange)[0], strange if lacking else names, 1)
        raise ValueError(
            f"the clips are of other layers: {len(lacking)} of this model are missing"
            f"{first_lacking}, and {len(strange)} are of layers that it does not have"
            f"{first_strange}{f' (near is {near[0]})' if near else ''}; convert the model with the"
            " same options as the one that they were saved of"
        )
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"{name} is {list(value.shape)}, but this model has {list(own[name].shape)};"
                " convert it with the same QuantConfig as the one that they were saved of"
            )
        if name.endswith(CLIP):
            quant.check_clip(value, name)
    model.load_state_dict(state, strict=False)


def _names(model: nn.Module, outcome: str) -> set[str]:
    names = clip_names(model)
    if not names:
        raise ValueError(
            f"no layer of this {type(model).__name__} is lsq's, so {outcome}; call"
            " lsq.convert(model)"
        )
    return names


def keep_apart(model: nn.Module, *, apart: bool = True) -> None:
    """Let `save_pretrained` of transformers' models in `model` leave clips out, or have it save
    everything again.

    So it writes an ordinary checkpoint. transformers reads `_keys_to_ignore_on_save` of each model.
    """
    for module in model.modules():
        if hasattr(type(module), "_keys_to_ignore_on_save"):
            own = clip_names(module)
            # once PEFT has merged adapters
            own |= {name.replace(".base_layer.", ".") for name in own}
            left = set(module._keys_to_ignore_on_save or ()) - own
            module._keys_to_ignore_on_save = left | own if apart else left


def warn_without_clips(model: nn.Module) -> None:
    """Look at the first optimizer that steps `model`, and warn if no optimizer has its clips.

    It was made before `convert` then. Weights are the same parameters as before, so that nothing
    else is lost.
    """
    reference = weakref.ref(model)

    def look(optimizer: Optimizer) -> None:
        model = reference()
        if model is not None and _parameters(optimizer).isdisjoint(map(id, model.parameters())):
            return  # it is another model's
        steps.before.remove(look)
        tensors = () if model is None else quantized_tensors(model)
        clips = {id(clip) for _, clip in tensors if clip.requires_grad}
        # clips may have an optimizer of their own
        optimizers = (
            one
            for one in gc.get_objects()
            if issubclass(type(one), Optimizer) and hasattr(one, "param_groups")
        )
        if clips and not any(clips & _parameters(one) for one in optimizers):
            logger.warning(
                "no optimizer has the %d clips of this %s, so that they do not learn: it was made"
                " before lsq.convert; make the optimizer, or the Trainer, afterwards",
                len(clips),
                type(model).__name__,
            )

    steps.before.append(look)


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
