"""Frozen weights of a converted model as codes alone: LoRA's adapters do not need their floats."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lsq.layers.coded_weight import CodedWeight
from lsq.layers.in_place import InPlace
from lsq.layers.programs import padded_words
from lsq.layers.weight_state import encoded
from lsq.models.conversion import check_bare
from lsq.program.tensor import Kind
from lsq.quant import WeightFormat
from lsq.run import parameter_state

SAVED = "of a head that has an adapter, with which PEFT saves it"


@dataclass(frozen=True, kw_only=True)
class CodesAlone:
    """The result of `freeze` and of `train_codes`.

    `kind`: "frozen" or "trained". `weights`: number of parameters that are now codes. `floats`:
    bytes that they had as floats. `codes`: bytes of codes and scales. `left`: reason -> number of
    weights that stay floats.
    """

    kind: str
    weights: int
    floats: int
    codes: int
    left: Mapping[str, int]

    def __str__(self) -> str:
        first = (
            f"{self.weights} {self.kind} weights are kept as codes alone, in"
            f" {self.codes / 1e6:,.1f} MB; their floats took {self.floats / 1e6:,.1f} MB more"
        )
        return "\n".join([first, *(f"left: {n} {reason}" for reason, n in self.left.items())])

    __repr__ = __str__


@torch.inference_mode(False)
def freeze(model: nn.Module) -> CodesAlone:
    """Keep the frozen weights of a converted model as codes alone, without float parameters.

    Passes give the same results, bit by bit. Parameters keep their names, shapes and dtypes. They
    read as the values that products see, and cannot be written. `lsq.revert` restores floats.

    Args:
        model: on the CPU, with its weights loaded; those that require no gradient are frozen.

    Returns:
        Counts of frozen weights, and reasons to leave others; print it.

    Raises:
        ValueError: nothing can be frozen, or the model is wrapped; the model is unchanged.
    """
    check_bare(model, "freeze")
    holders = Counter(
        id(one) for module in model.modules() for one in set(module.parameters(recurse=False))
    )
    shared = {one for one, count in holders.items() if count > 1}
    saved = _saved_heads(model)
    chosen, left = chosen_weights(
        model,
        lambda module, name: SAVED if id(module) in saved else _reason(module, name, shared),
        "be kept",
    )
    weights, floats, codes = map(sum, zip(*(_freeze(*one) for one in chosen), strict=True))
    return CodesAlone(kind="frozen", weights=weights, floats=floats, codes=codes, left=left)


def chosen_weights(
    model: nn.Module, reason_of: Callable[[InPlace, str], str | None], what: str
) -> tuple[list[tuple[InPlace, str]], Counter[str]]:
    """Return the weights (module, name) that `reason_of` gives no reason to leave, and how many
    parameters are left for each reason. Raises ValueError: none can `what`, as "be kept"."""
    chosen, left = [], Counter()
    for module in model.modules():
        for name, declared in module.declared.items() if isinstance(module, InPlace) else ():
            if declared.kind is Kind.WEIGHT:
                reason = reason_of(module, name)
                if reason is None:
                    chosen.append((module, name))
                else:
                    left[reason] += len(module.sources(name))
    if not chosen:
        reasons = [f"{count} are {reason}" for reason, count in left.items()]
        raise ValueError(
            f"no weight of this {type(model).__name__} can {what} as codes alone: "
            + ("; ".join(reasons) or "no layer is lsq's, call lsq.convert(model) first")
        )
    return chosen, left


def _saved_heads(model: nn.Module) -> set[int]:
    """Return ids of output embeddings with an adapter: PEFT saves their weights beside it."""
    models = [module for module in model.modules() if hasattr(module, "get_output_embeddings")]
    heads = [one.get_output_embeddings() for one in models]
    return {id(head.base_layer) for head in heads if hasattr(head, "base_layer")}


def _reason(module: InPlace, name: str, shared: Collection[int]) -> str | None:
    parts, clip = module.sources(name), module.declared[name].clip
    if module.is_coded(name):
        return "codes alone already"
    if (
        module.schedule.float_fallback
        or clip is None
        or not isinstance(module.quant.weight_form(name), WeightFormat)
    ):
        return "read as floats by products, by their mode, their format or a fall back"
    if any(one.requires_grad for one in (*parts, module.own_parameter(clip))):
        return (
            "trained, or their clips are; PEFT's adapters or requires_grad_(False) come before"
            " lsq.freeze"
        )
    if any(type(one) is not nn.Parameter for one in parts):
        return "parametrized, or otherwise no plain parameters"
    if any(id(one) in shared for one in parts):
        return "shared with an embedding or another module"
    if module.weight_masks is not None:
        return "sparse"
    if any(one.device.type != "cpu" for one in parts):
        return f"on {parts[0].device}, and not on the CPU, where alone codes do without floats"
    return None


@torch.no_grad()
def _freeze(module: InPlace, name: str) -> tuple[int, int, int]:
    """Freeze one weight; return its number of parameters, bytes of floats, bytes of codes."""
    if not module.schedule.begun:  # no pass has measured clips
        module.calibrate_weights()
        module.schedule.measured_weights()
    declared, parts = module.declared[name], module.sources(name)
    values = module.own_parameter(name)
    rows = values.shape[declared.in_out]
    codes = encoded(
        values,
        module.own_parameter(declared.clip),
        module.quant.weight_form(name),
        module.target,
        rows=padded_words(module.quant, rows) if module.pads_rows else rows,
        in_out=declared.in_out,
        absmax=not module.quant.learned,
    )
    first = 0
    for (_, holder, last), part in zip(module.holders(name), parts, strict=True):
        count = codes.rows if declared.in_out else len(part)
        holder._parameters[last] = CodedWeight.parameter(codes, first, first + count, part.dtype)
        first += count
        parameter_state.withdraw(part)
    module.forget_floats(name)
    return len(parts), sum(part.nbytes for part in parts), codes.nbytes
