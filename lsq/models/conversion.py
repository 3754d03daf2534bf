"""Conversion of a model's linear layers and known whole layers to int8 in place, and back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lsq.config import QuantConfig, require_model
from lsq.layers.coded_weight import CodedWeight, decode_all
from lsq.layers.in_place import InPlace
from lsq.layers.model_formats import check_patterns
from lsq.models.clips import clip_names, keep_apart, warn_of_optimizers
from lsq.models.selection import Layer, Report, Skip, Whole, conversions, stacks_of
from lsq.run import shards

Model = TypeVar("Model", bound=nn.Module)
FUSED = "Fused"
UNDIVIDED = "_no_split_modules"
"""The attribute in which models of transformers name classes that accelerate and others wrap as
units."""


def convert(
    model: nn.Module,
    quant: QuantConfig | None = None,
    *,
    skip: Skip = (),
    minimum_width: int = 64,
    tied: bool = False,
    fused: bool = True,
    check: bool = True,
) -> Report:
    """Let the linear layers of `model` multiply in int8, forward and backward, in place.

    Layers change their class; parameters, their names, hooks and module paths stay. A
    torch.nn.Linear becomes a lsq.layers.QuantizedLinear, a subclass; the Conv1D of transformers'
    GPT-2 becomes a subclass of Conv1D. Whole layers that lsq.models.architectures knows become one
    program each. A projection onto a vocabulary without a bias runs together with the cross-entropy
    of its logits. The first pass measures clips, so weights may be loaded before or after
    conversion; a model may be on the meta device.

    Args:
        model: any. Convert it before its optimizer is made, which trains learned clips, and
            before DistributedDataParallel and fully_shard; after PEFT, unless fused=False.
        quant: what is rounded, and how.
        skip: modules to leave as they are, with all modules inside: names, ends of names after a
            dot ("lm_head"), patterns with * and ?, or a function of (layer, name).
        minimum_width: leave layers with fewer inputs or outputs, which would gain nothing.
        tied: also convert layers that share an embedding's weight.
        fused: convert whole layers; False: linear layers alone.
        check: in its first pass, compare each fused layer with the code of its class, in floats
            on a few tokens.

    Returns:
        The report of converted layers, and of reasons to leave others; print it.

    Raises:
        TypeError: `model` is no torch.nn.Module (a Trainer, for example), or `skip` or
            `minimum_width` has another type.
        ValueError: nothing can be converted, a pattern in `skip` or in a format fits nothing,
            the model is wrapped already, the mode is "float" and no whole layer is known, or a
            model that is to be sparse is on the meta device. Any exception leaves the model
            unchanged.
    """
    check_bare(model, "convert")
    quant = QuantConfig() if quant is None else quant
    if not isinstance(quant, QuantConfig):
        raise ValueError(
            f"quant is {quant!r:.80}; it must be a lsq.QuantConfig, such as"
            " QuantConfig(backward='float')"
        )
    if not isinstance(minimum_width, Real):
        raise TypeError(f"minimum_width is {minimum_width!r:.80}; it must be a number, such as 64")
    if quant.sparsity and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on the meta device, where weights have no masks; load or initialise it"
            " first"
        )
    layers = conversions(model, quant, skip, minimum_width=minimum_width, tied=tied, fused=fused)
    whole = tuple(one.entry for one in layers if isinstance(one.entry, Whole))
    modules = list(model.modules())
    converted = any(isinstance(module, InPlace) for module in modules)
    of_transformers = any(
        type(module).__module__.startswith("transformers.models.") for module in modules
    )
    unknown = fused and not whole and of_transformers and not converted
    report = Report(
        layers=tuple(one.entry for one in layers if isinstance(one.entry, Layer)),
        numbers=quant.summary,
        whole=whole,
        stacks=stacks_of(model, minimum_width),
        unknown=type(model).__name__ if unknown else None,
    )
    if not report.converted and not (report.fused if quant.quantized else whole):
        fault = "has no linear layer to convert"
        if converted:
            fault = "is converted already; to convert it anew, call lsq.revert(model) first"
        raise ValueError(f"{type(model).__name__} {fault}. {report}")
    with _all_or_nothing(model):
        for one in layers:
            if one.kind is not None:
                one.module.__class__ = one.kind
                one.module.take_place(quant, one.entry.name)
        _name_classes(model)
        keep_apart(model)
        check_patterns(model, quant)
        for one in layers:
            if one.kind is not None:
                one.module.finish_conversion(check)
    if quant.learned:
        warn_of_optimizers(model)
    return report


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Give every module of `model` its class and attributes back after an exception."""
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    # other objects may hold these, as handles of hooks do
    contents = [
        (value, copy.copy(value))
        for *_, attributes in before
        for value in attributes.values()
        if isinstance(value, dict | set)
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        for value, content in contents:
            value.clear()
            value.update(content)
        raise


def _name_classes(model: nn.Module) -> None:
    """Let UNDIVIDED name fused classes, and float classes only where layers still have them."""
    for module in model.modules():
        listed = getattr(module, UNDIVIDED, None)
        if not listed:
            continue
        plain = {name.removeprefix(FUSED) for name in listed}
        kinds = {type(part) for part in module.modules()}
        fused = {
            kind.__name__
            for kind in kinds
            if issubclass(kind, InPlace) and kind.float_class.__name__ in plain
        }
        left = {name for name in plain if FUSED + name not in fused}
        left |= {kind.__name__ for kind in kinds} & plain
        setattr(module, UNDIVIDED, type(listed)(sorted(fused | left)))


def revert(model: Model) -> Model:
    """Change converted layers back to float layers with their present weights, in place.

    Returns the model. Clips are removed, and weights that are codes alone (lsq.freeze) become
    floats. Raises ValueError if the model is wrapped, or a layer has a forward of its own.
    """
    check_bare(model, "revert")
    converted = [module for module in model.modules() if isinstance(module, InPlace)]
    for module in converted:
        if "forward" in vars(module):
            raise ValueError(
                "a converted layer has a forward of its own; remove the hooks that have put it in,"
                " first"
            )
    keep_apart(model, apart=False)
    for module in converted:
        module.give_place()
    for module in model.modules():
        decode_all(module)
    _name_classes(model)
    return model


def float_state_dict(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the state dict of the float model: without clips, with decoded weights.

    With a `dtype`, all floats have it, and a weight that is codes is decoded when it is read:
    transformers' save_pretrained(state_dict=..., max_shard_size=...) does so shard by shard.
    """
    names = clip_names(model)

    def floats(value: torch.Tensor) -> torch.Tensor:
        coded = isinstance(value, CodedWeight)
        if dtype is None or not value.is_floating_point():
            return value.decode() if coded else value
        return value.read_as(dtype) if coded else value.to(dtype)

    return {name: floats(one) for name, one in model.state_dict().items() if name not in names}


def check_bare(model: nn.Module, task: str) -> None:
    """Raise an error for a wrapped model, or no module; `task`: a verb for it, as "convert"."""
    require_model(model)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | nn.DataParallel):
            where, kind = f"{name!r} is" if name else "the model is", type(module).__name__
            raise ValueError(
                f"{where} wrapped in {kind}; {task} what is inside, before it is wrapped"
            )
        if any(map(shards.is_shard, module.parameters(recurse=False))):
            raise ValueError(
                f"parameters of {name!r} are shards; {task} the model before fully_shard or"
                " parallelize_module"
            )
