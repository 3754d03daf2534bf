"""Widths of the codes of nodes in graph layers, by their degree.

Clips and scales stay: codes of fewer bits are multiples of a whole number (lsq.ops.coarsen).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lsq.config import require_model
from lsq.graphs.widths import groups_of, widths_of
from lsq.layers import clip_format
from lsq.layers.module import ProgramModule
from lsq.quant import maximum_code

NAME = "node_bits"
"""The attribute of graph layers, and its entry in state dicts: pairs in JSON."""

Widths = Mapping[int, int]
"""Least degree -> bits, sorted."""


def set_node_bits(model: nn.Module, bits: Mapping[int, int] | int | None) -> None:
    """Choose the widths of the codes of nodes in all graph layers of a converted `model`.

    This is for all passes from now on, also in training. The degree of a node is the number of
    edges that lead to it in the graph of the pass, without a layer's own self-loops. Layers in a
    GINConv's nn, which see no graph, keep the bits of QuantConfig, and so do passes in floats.

    Args:
        model: after lsq.convert.
        bits: least degree -> bits, 2 up to those of QuantConfig, {0: 8, 16: 4}; a number for all
            nodes; None: the bits of QuantConfig.

    Raises:
        ValueError: no layer is a converted graph layer, one does not multiply int8 codes, the
            degrees leave some nodes out, or a number of bits is not allowed.
    """
    require_model(model)
    layers = {path: module for path, module in model.named_modules() if has_node_bits(module)}
    if not layers:
        raise ValueError(
            f"no layer of this {type(model).__name__} is a graph layer of lsq; call"
            " lsq.convert(model) on a model of PyTorch Geometric first"
        )
    widths = None if bits is None else widths_of(bits)
    for path, layer in layers.items() if widths is not None else ():
        name, quant = path or type(layer).__name__, layer.quant
        if not quant.coded:
            raise ValueError(
                f"bits is {widths}, but {name} does not multiply int8 codes: it has mode="
                f"{quant.mode!r}, weight_format={quant.weight_format!r}, activation_format="
                f"{quant.activation_format!r}; give bits=None, or convert the model to int8"
            )
        if max(widths.values()) > quant.bits:
            raise ValueError(
                f"bits is {widths}, but {name} rounds to {quant.bits} bits; give nodes at most"
                " that many"
            )
    for layer in layers.values():
        layer.node_bits = widths


def has_node_bits(module: nn.Module) -> bool:
    """Whether a module is a graph layer of lsq."""
    return isinstance(module, ProgramModule) and hasattr(module, NAME)


def units_of(degrees: Tensor, widths: Widths, largest: int) -> Tensor:
    """Return the units int8 [N] of the codes of nodes; `largest`: the largest code of the scale."""
    units = [largest // maximum_code(bits) for bits in widths.values()]
    table = torch.tensor(units, dtype=torch.int8, device=degrees.device)
    return table[groups_of(degrees, list(widths))]


def save(destination: dict[str, Tensor], prefix: str, widths: Widths | None) -> None:
    if widths is not None:
        destination[prefix + NAME] = clip_format.entry_of([*widths.items()])


def load(state_dict: dict[str, Tensor], prefix: str, ours: Widths | None) -> None:
    """Take the widths out of a state dict; ValueError if they are damaged or differ. State dicts
    without clips have none."""
    entry, theirs = state_dict.pop(prefix + NAME, None), None
    if entry is not None:
        try:
            theirs = widths_of(dict(clip_format.value_of(entry)))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{prefix}{NAME} holds no widths of nodes ({error}); load a sound checkpoint"
            ) from None
    if theirs != ours and (entry is not None or prefix + clip_format.NAME in state_dict):
        raise ValueError(
            f"the checkpoint ({prefix}*) was trained with the bits of nodes {theirs}, but this"
            f" model has {ours}; call lsq.models.set_node_bits(model, {theirs}) before it is"
            " loaded, and set others after that"
        )
