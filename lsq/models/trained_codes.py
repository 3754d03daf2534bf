"""Weights of a converted model that train as codes, without a float master copy."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from lsq.layers.coded_weight import Codes
from lsq.layers.in_place import InPlace
from lsq.layers.programs import padded_words
from lsq.layers.trained_codes import TrainedCodes
from lsq.models.conversion import check_bare
from lsq.models.frozen import CodesAlone, chosen_weights
from lsq.quant import Grain, WeightFormat
from lsq.run import parameter_state

DEVICES = ("cpu", "meta")
Place = tuple[nn.Module, str]
"""A module and the name of its parameter."""


@torch.no_grad()
def train_codes(model: nn.Module, *, remainder: bool = True) -> CodesAlone:
    """Keep the trained weights of a converted model as int8 codes alone, without float copies.

    Products read the codes. lsq.optim.Adam steps on them and rounds at random
    (lsq.quant.compact). Embeddings become codes, too. Parameters keep their names and shapes; they
    read as floats, and `copy_` changes them. State dicts hold floats, from which the same codes
    come back. `lsq.revert` restores floats.

    Args:
        model: on the CPU; the optimizer is made afterwards. On the meta device, codes are made
            without values, for `copy_` to fill.
        remainder: keep 8 bits more of each weight: 2 bytes a parameter, and training is as with
            floats. False: 1 byte; it suits finetuning.

    Returns:
        Counts of weights, and reasons to leave others; print it.

    Raises:
        ValueError: nothing can be kept as codes, or the model is wrapped; it is unchanged.
    """
    check_bare(model, "train_codes")
    places = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    chosen, left = chosen_weights(model, _reason, "train")
    counted = [_keep(module, name, remainder, places) for module, name in chosen]
    counted += [_keep_embedding(one, remainder, places) for one in _embeddings(model)]
    weights, floats, codes = map(sum, zip(*counted, strict=True))
    return CodesAlone(kind="trained", weights=weights, floats=floats, codes=codes, left=left)


def _reason(module: InPlace, name: str) -> str | None:
    """Return why a weight stays as it is, or None."""
    declared, parts = module.declared[name], module.sources(name)
    form = None if declared.clip is None else module.quant.weight_form(name)
    if module.is_coded(name):
        return "codes alone already"
    if module.quant.learned:
        return 'rounded under learned clips; QuantConfig(clips="absmax") has others'
    if not isinstance(form, WeightFormat) or form.bits != 8 or form.grain != Grain.ROW:
        return "of another format than int8 with a clip for each row"
    if declared.in_out:
        return "of layers with weights [inputs, outputs], as Conv1D"
    if not all(one.requires_grad for one in parts):
        return "not trained; lsq.freeze is for them"
    if any(type(one) is not nn.Parameter for one in parts):
        return "parametrized, or otherwise no plain parameters"
    if module.weight_masks is not None:
        return "sparse"
    if any(one.dtype != torch.float32 for one in parts):
        return f"{parts[0].dtype}, and not float32; call model.float() before"
    if any(one.device.type not in DEVICES for one in parts):
        return f"on {parts[0].device}, and not on the CPU"
    return None


def _embeddings(model: nn.Module) -> Iterator[nn.Embedding]:
    """List embeddings of floats that train, without options that change weights in passes."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module.weight) is nn.Parameter:
            weight = module.weight
            plain = module.max_norm is None and not module.sparse and weight.requires_grad
            if plain and weight.dtype == torch.float32 and weight.device.type in DEVICES:
                yield module


def _keep(
    module: InPlace, name: str, remainder: bool, places: dict[int, list[Place]]
) -> tuple[int, int, int]:
    """Keep one weight; return its number of parameters, bytes of floats, bytes of codes."""
    parts = module.sources(name)
    count = sum(map(len, parts))
    rows = padded_words(module.quant, count) if module.pads_rows else count
    codes = _codes(rows, count, parts[0].shape[1], module.quant.weight_form(name), remainder)
    found = _replace(parts, codes, places)
    module.forget_floats(name)
    return found


def _keep_embedding(
    module: nn.Embedding, remainder: bool, places: dict[int, list[Place]]
) -> tuple[int, int, int]:
    form = WeightFormat(name="int8", bits=8, grain=Grain.ROW)
    rows, columns = module.weight.shape
    return _replace([module.weight], _codes(rows, rows, columns, form, remainder), places)


def _codes(rows: int, count: int, columns: int, form: WeightFormat, remainder: bool) -> Codes:
    """Make zeros, the codes of a weight [count, columns] padded to `rows`."""
    return Codes(
        format=form,
        stored=torch.zeros(rows, columns, dtype=torch.int8),
        scale=torch.ones(rows, dtype=torch.float32),
        rows=count,
        columns=columns,
        in_out=False,
        remainder=torch.zeros(rows, columns, dtype=torch.int8) if remainder else None,
    )


def _replace(
    parts: list[torch.Tensor], codes: Codes, places: dict[int, list[Place]]
) -> tuple[int, int, int]:
    """Put parameters of `codes` in place of the parts of a weight, wherever they are held."""
    first, floats = 0, sum(part.nbytes for part in parts)
    for part in parts:
        kept = TrainedCodes.parameter(codes, first, first + len(part), part.dtype)
        if not part.is_meta:
            kept.encode(part)
        first += len(part)
        for holder, name in places[id(part)]:
            holder._parameters[name] = kept
        parameter_state.withdraw(part)
    return len(parts), floats, codes.nbytes
