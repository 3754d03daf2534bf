"""What the quantisers of a model do: clips, how much is clipped, how many codes are in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lsq import quant
from lsq.layers.module import CLIP, ProgramModule


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """One quantised tensor in one forward pass."""

    kind: str
    """"weight" or "activation"."""
    clip: float
    """The clip; the mean over output channels."""
    clipped_share: float
    """Share of elements outside the clip, 0 to 1."""
    zero_share: float
    """Share of elements whose code is 0."""
    largest_code: int
    """Largest |code| in use."""


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, clip) of every quantised tensor: "encoder.layers.0.self_attn.input" has the clip "..._clip"."""
    for name, parameter in model.named_parameters():
        if name.endswith(CLIP):
            yield name.removesuffix(CLIP), parameter


@contextmanager
def observe(model: nn.Module):
    """Collect statistics of every forward pass inside: yields a dict of name -> TensorStatistics, the last pass's."""
    found: dict[str, TensorStatistics] = {}
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, ProgramModule)]
    for name, module in modules:
        module._observer = _observer(found, name + "." if name else "")
    try:
        yield found
    finally:
        for _, module in modules:
            module._observer = None


def _observer(found, prefix):
    def after(operation, values) -> None:
        clip = next((t for t in operation.inputs if t is not None and t.name.endswith(CLIP)), None)
        codes = next((t for t in operation.outputs if t is not None and t.dtype == torch.int8), None)
        if clip is None or codes is None:
            return
        clipped = next((t for t in operation.outputs if t is not None and t.name.endswith(".clipped")), None)
        kind = "weight" if clipped is None else "activation"
        limit, rounded = values[clip], values[codes]
        if kind == "weight":
            weight = values[operation.inputs[0]]
            rounded = rounded[: weight.shape[0]]
            outside = (weight.abs() > limit[:, None]).sum().item()
        else:
            outside = quant.unpack_bits(values[clipped], rounded.numel()).sum().item()
        found[prefix + clip.name.removesuffix(CLIP)] = TensorStatistics(
            kind=kind,
            clip=limit.mean().item(),
            clipped_share=outside / rounded.numel(),
            zero_share=(rounded == 0).sum().item() / rounded.numel(),
            largest_code=int(rounded.abs().max()),
        )

    return after
