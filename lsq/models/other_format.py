"""Clips of one number format in a model of another: what is kept, and what is measured anew.

All that reads checkpoints of other formats goes through `load_other_format`: `load_clips`, and
`lsq convert-checkpoint` of files of fairseq and of folders of transformers.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.module import ProgramModule
from lsq.observe.statistics import program_modules
from lsq.program.tensor import Kind

ACTIVATION_FIELDS = ("activation_format", "bits")
"""Those of clip_format.FIELDS that say what clips of activations mean."""
CLIP = "_clip"
"""How names of clips end."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a model measures of its clips after it has loaded those of another format.

    As text, what became of them.
    """

    weights: frozenset[str]
    """Names of the clips of weights, all of which were measured anew."""
    activations_due: bool
    """Whether the next pass measures clips of activations; else they were kept."""

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
    """Raise the ValueError of a checkpoint that has other values of fields already."""
    fields = ", ".join(f"{field}={value!r}" for field, value in changes.items())
    raise ValueError(f"{checkpoint} has {fields} already; nothing is written")


def formats_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Names of the formats of modules in the state dict of `model` -> their fields."""
    return {
        prefix + clip_format.NAME: clip_format.fields_of(module.quant)
        for prefix, module in _rounding(model)
    }


def load_other_format(
    model: nn.Module, state: Mapping[str, torch.Tensor], wanted: Collection[str]
) -> Measured:
    """Load a state dict whose clips may be of another format than those of `model`.

    Clips of weights are measured anew, on the weights that the model then has. Those of activations
    are kept, or measured in the next pass if their format differs.

    Args:
        model: whose layers of lsq have clips.
        state: of such a model; those of earlier versions do not say their formats, see
            clip_format.stored.
        wanted: names that it must hold, but for clips of weights, and formats.

    Raises:
        ValueError: names or shapes do not fit, a clip that is kept cannot be used, or clips would
            have to be measured where QuantConfig says that they are fixed. Nothing is loaded then.
    """
    own, kept, optional = model.state_dict(), dict(state), set()
    due, measured = False, set()
    for prefix, module in _rounding(model):
        ours = clip_format.fields_of(module.quant)
        entry = prefix + clip_format.NAME
        theirs = clip_format.stored(kept.get(entry), entry, ours)
        optional.add(prefix + "float_fallback")  # which earlier versions do not have
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
        _check_measured(module.quant, [*of_weights, *of_activations])
        # clips until they are measured
        kept |= {name: own[name] for name in (entry, *of_weights, *of_activations)}
        measured.update(of_weights)
        if of_activations and prefix + "calibrated" in kept:
            kept[prefix + "calibrated"] = torch.tensor(False)
            due = True
    _check(model, own, kept, set(wanted) - optional)
    nn.Module.load_state_dict(model, kept, strict=False)
    for _, module in _rounding(model):
        module.calibrate_weights()
    return Measured(weights=frozenset(measured), activations_due=due)


def _check_measured(quantization: QuantConfig, due: list[str]) -> None:
    """Refuse to measure clips, given by name, where they are fixed."""
    if due and quantization.clip_init == "fixed":
        raise ValueError(
            f"{due[0]} must be measured for the new format, but clip_init is 'fixed', under which"
            f" nothing is measured: add {clip_format.option('clip_init')} mse, in Python"
            " QuantConfig(clip_init='mse')"
        )


def _rounding(model: nn.Module) -> Iterator[tuple[str, ProgramModule]]:
    """Prefixes of names, and modules whose clips have a format."""
    for path, module in program_modules(model).items():
        if module.quant.quantized:
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
