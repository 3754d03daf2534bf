"""A model's linear layers, and whole layers that are known, as int8 ones, in place, and back."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lsq.config import QuantConfig, require_model
from lsq.layers.coded_weight import CodedWeight, decode_all
from lsq.layers.head import head_class
from lsq.layers.in_place import InPlace
from lsq.layers.linear import QuantizedLinear, in_out_of
from lsq.layers.model_formats import check_patterns
from lsq.models import clip_optimizer
from lsq.models.clip_state import clip_names, keep_apart
from lsq.models.fusion import fusions, name_classes, of_transformers, told
from lsq.models.report import Report
from lsq.models.selection import Skip, choose, stacks_of
from lsq.run import shards

Model = TypeVar("Model", bound=nn.Module)
MINIMUM_WIDTH = 64
"""Narrower products are over before anything is gained, such as those of LoRA's adapters and of
small heads."""


def convert(
    model: nn.Module,
    quant: QuantConfig | None = None,
    *,
    skip: Skip = (),
    minimum_width: int = MINIMUM_WIDTH,
    tied: bool = False,
    fused: bool = True,
    check: bool = True,
) -> Report:
    """Let the linear layers of `model` multiply in int8, forward and backward.

    It works in place: a torch.nn.Linear becomes a lsq.layers.QuantizedLinear, which is one, too,
    with the same parameters, hooks and places in the model; so does the Conv1D of transformers'
    GPT-2. Whole layers of transformers and PyTorch whose class lsq.models.architectures knows
    become one program each. A projection onto a vocabulary without a bias runs together with the
    cross-entropy of what it gives (see lsq.layers.logits). New are the clips, which are measured in
    the first
    pass: weights may be loaded before or afterwards, and the model may be on the meta device.

    Args:
        model: any. Convert it before its optimizer is made, which shall train the clips, before
            DistributedDataParallel and fully_shard, and after PEFT, or with fused=False before it.
        quant: what is rounded, and how.
        skip: modules to leave as they are with all inside them: names, their ends from a dot on
            ("lm_head"), patterns with * and ?, or a function of (layer, name) that says whether to
            leave that layer.
        minimum_width: layers with fewer inputs or outputs are left as they are.
        tied: convert layers whose weight is an embedding's, too.
        fused: whole layers that are known, and the projection onto the vocabulary with its loss,
            become programs; False converts linear layers alone.
        check: compare each fused layer once, in its first pass, with the code of its class, on a
            few tokens in floats.

    Returns:
        What was converted, and why the others were not; print it.

    Raises:
        TypeError: `model` is no torch.nn.Module, but a Trainer, say.
        ValueError: nothing can be converted, a pattern in `skip` or in a format fits nothing, the
            model is wrapped already, the mode is "float" where no layer is known, or a model that
            is to be sparse is on the meta device. After any exception the model is as it was.
    """
    check_bare(model, "convert")
    quant = QuantConfig() if quant is None else quant
    if not isinstance(quant, QuantConfig):
        raise ValueError(
            f"quant is {quant!r:.80}; it must be a lsq.QuantConfig, such as"
            " QuantConfig(backward='float')"
        )
    if quant.sparsity and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on the meta device, where weights have no masks; load or initialise it"
            " first"
        )
    choices = choose(model, quant, skip, minimum_width=minimum_width, tied=tied, heads=fused)
    whole = (
        fusions(model, quant, choose(model, quant, skip, minimum_width=1, tied=tied))
        if fused
        else []
    )
    report = Report(
        layers=told(choices, whole),
        numbers=quant.summary,
        whole=tuple(one.whole for one in whole),
        stacks=stacks_of(model, minimum_width),
        unknown=type(model).__name__ if fused and not whole and of_transformers(model) else None,
    )
    if not report.converted and (quant.quantized or not whole):
        fault = "has no linear layer to convert"
        if any(isinstance(module, InPlace) for module in model.modules()):
            fault = "is converted already; to convert it anew, call lsq.revert(model) first"
        raise ValueError(f"{type(model).__name__} {fault}. {report}")
    fused_layers = [fusion for fusion in whole if fusion.whole.reason is None]
    with _all_or_nothing(model):
        for fusion in fused_layers:
            _swap(fusion.module, fusion.kind, quant, fusion.whole.name)
        for choice, layer in zip(choices, report.layers, strict=True):
            if layer.reason is None and layer.within is None:
                kind = head_class() if layer.head else _linear_class(type(choice.module))
                _swap(choice.module, kind, quant, layer.name)
        name_classes(model)
        keep_apart(model)
        check_patterns(model, quant)
        for fusion in fused_layers:
            fusion.module.compared = not check
            fusion.module.join()  # moves parameters, so nothing fails after it
    if quant.learned:
        clip_optimizer.watch(model)
    return report


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Give every module of `model` its class and attributes back if what is done meanwhile
    fails."""
    before = [
        (
            module,
            type(module),
            {name: (value, _content(value)) for name, value in vars(module).items()},
        )
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            for name, (value, content) in attributes.items():
                vars(module)[name] = value
                if content is not None:  # others may hold the dict itself, as handles of hooks do
                    value.clear()
                    value.update(content)
        raise


def _content(value: object) -> dict | set | None:
    return copy.copy(value) if isinstance(value, dict | set) else None


def _linear_class(float_class: type[nn.Module]) -> type[InPlace]:
    return QuantizedLinear if float_class is nn.Linear else in_out_of(float_class)


def _swap(module: nn.Module, kind: type[InPlace], quant: QuantConfig, path: str) -> None:
    """By its class alone: whoever holds the layer or its parameters holds them still."""
    before, attributes = type(module), dict(vars(module))
    module.__class__ = kind
    try:
        module.take_place(quant, path)
    except ValueError:
        module.__class__ = before
        vars(module).clear()
        vars(module).update(attributes)
        raise


def revert(model: Model) -> Model:
    """Make the layers of `convert` what they were, with the weights that they have now; the clips
    are gone.

    Weights that are codes alone (lsq.freeze) become floats, one after the other.

    Works in place.

    Returns:
        The model.

    Raises:
        ValueError: the model is wrapped, or a layer has got a forward of its own since.
    """
    check_bare(model, "revert")
    found = [module for module in model.modules() if isinstance(module, InPlace)]
    for module in found:
        if "forward" in vars(module):
            raise ValueError(
                "a converted layer has a forward of its own; remove the hooks that have put it in,"
                " first"
            )
    keep_apart(model, apart=False)
    for module in found:
        module.give_place()
    for module in model.modules():
        decode_all(module)
    name_classes(model)
    return model


def float_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of `model` without what its converted layers add: that of the float model.

    Weights that are codes alone (lsq.freeze) are decoded.
    """
    names = clip_names(model)
    return {
        name: value.decode() if isinstance(value, CodedWeight) else value
        for name, value in model.state_dict().items()
        if name not in names
    }


def check_bare(model: nn.Module, what: str) -> None:
    require_model(model)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | nn.DataParallel):
            where, kind = f"{name!r} is" if name else "the model is", type(module).__name__
            raise ValueError(
                f"{where} wrapped in {kind}; {what} what is inside, before it is wrapped"
            )
        if any(map(shards.is_shard, module.parameters(recurse=False))):
            raise ValueError(
                f"parameters of {name!r} are shards of FSDP2; {what} the model before fully_shard"
            )
