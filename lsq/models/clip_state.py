"""What converted layers add to the state dict of a model: by itself, and out of the checkpoints
that others read."""

import difflib
from collections.abc import Mapping

import torch
from torch import nn

from lsq import quant
from lsq.config import require_model
from lsq.layers import clip_format
from lsq.layers.module import ProgramModule
from lsq.layers.schedule import Schedule, renamed
from lsq.models.other_format import CLIP, formats_of, load_other_format
from lsq.run import shards


def clip_names(model: nn.Module) -> set[str]:
    """The names in the state dict of `model` that its float form does not have: clips, when they
    are measured, what format they are of, masks of weights.
    """
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
    """Those entries: copies on the CPU, float32 [...] clips, float64 [], float32 [...] formats,
    float16 [...] masks.

    Raises:
        ValueError: there are none, or clips are shards of FSDP2, whose checkpoints have them.
    """
    names = _names(model, "there are no clips")
    found = {name: value.detach() for name, value in model.state_dict().items() if name in names}
    if any(map(shards.is_shard, found.values())):
        raise ValueError(
            "clips are shards of FSDP2; save them by torch.distributed.checkpoint, with the weights"
        )
    return {
        name: value.cpu().clone(memory_format=torch.contiguous_format)
        for name, value in found.items()
    }


def load_clip_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, other_format: bool = False
) -> None:
    """Let the converted layers of `model` go on with the clips of a `clip_state`; weights stay as
    they are.

    Args:
        other_format: they may be of a model of another format. Clips of weights are then measured
            anew, on the weights that the model has; those of activations are kept, or measured in
            the next pass where their format is another one, too.

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
        clip_format.check(
            clip_format.stored(state.get(name), name, ours),
            ours,
            name.removesuffix(clip_format.NAME),
        )
    wanted = (names & own.keys()) - formats.keys()  # in float mode, masks alone
    lacking, strange = sorted(wanted - state.keys()), sorted(state.keys() - names)
    if lacking or strange:
        near = difflib.get_close_matches(
            (lacking or strange)[0], strange if lacking else names, n=1
        )
        raise ValueError(
            f"the clips are of other layers: {len(lacking)} of this model are missing"
            f"{f', first {lacking[0]}' if lacking else ''}, and {len(strange)} are of layers that"
            " it does not have"
            f"{f', first {strange[0]}' if strange else ''}"
            f"{f' (near is {near[0]})' if near else ''}; convert the model with"
            " the same options as the one that they were saved of"
        )
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"{name} is {list(value.shape)}, but this model has {list(own[name].shape)};"
                " convert it with the same "
                "QuantConfig as the one that they were saved of"
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

    So it writes an ordinary checkpoint. What transformers calls `_keys_to_ignore_on_save` is a set
    of each model.
    """
    for module in model.modules():
        if hasattr(type(module), "_keys_to_ignore_on_save"):
            own = clip_names(module)
            # once PEFT has merged adapters
            own |= {name.replace(".base_layer.", ".") for name in own}
            left = set(module._keys_to_ignore_on_save or ()) - own
            module._keys_to_ignore_on_save = left | own if apart else left
