"""Statistics of a model's quantisers: clips, shares of clipped values, codes in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lsq import quant
from lsq.config import require_model
from lsq.layers.module import ProgramModule
from lsq.ops.calibration import integer_bits
from lsq.ops.fake_quantize import FakeQuantize
from lsq.program.operation import Operation
from lsq.program.values import Coded
from lsq.quant import Format
from lsq.quant.numbers import ScaledFormat


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
    """Share of elements whose code, or decoded value, is 0."""
    largest_code: int | None
    """Largest |code| in use; None of values that are no integers under one scale for all that
    shares a clip."""
    bits: int | None
    """Width of such codes."""


def quantized_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, clip) of every quantised tensor: "encoder.layers.0.self_attn.input" has the clip
    "..._clip"."""
    seen: set[int] = set()
    for prefix, module in _program_modules(model):
        for name, clip in module.clips().items():
            if id(clip) not in seen:
                seen.add(id(clip))
                yield prefix + name.removesuffix("_clip"), clip


@contextmanager
def observe(model: nn.Module):
    """Collect statistics of every forward pass inside: yields a dict of name -> TensorStatistics,
    the last pass's."""
    found: dict[str, TensorStatistics] = {}
    modules = list(_program_modules(model))
    for prefix, module in modules:
        module._observer = _Observer(module, found, prefix)
    try:
        yield found
    finally:
        for _, module in modules:
            module._observer = None


def _program_modules(model: nn.Module) -> Iterator[tuple[str, ProgramModule]]:
    """(what begins the names of its parameters, module)."""
    require_model(model)
    for name, module in model.named_modules():
        if isinstance(module, ProgramModule):
            yield name + "." if name else "", module


class _Observer:
    """Called after every operation of a module's forward pass."""

    def __init__(self, module: ProgramModule, found: dict[str, TensorStatistics], prefix: str):
        self._module, self._found, self._prefix = module, found, prefix

    def __call__(self, declared: Operation, operation: Operation) -> None:
        rounding = operation.rounding()
        if rounding is None:
            return
        by_row = isinstance(rounding, Coded) and rounding.by_row
        if isinstance(rounding, FakeQuantize):
            codes, form = rounding.out, rounding.form if rounding.given else None
        else:
            codes, form = rounding.codes, None if by_row else rounding.format
        if by_row:
            outside = 0
        elif rounding.clipped is None:
            outside = int(
                (operation.unrounded(self._module.target.run).abs() > rounding.clip).sum()
            )
        else:
            outside = int(quant.unpack_bits(rounding.clipped, codes.numel()).sum())
        self._note(declared.rounding().clip.name, "activation", rounding.clip, codes, form, outside)

    def weights(self, module: ProgramModule, tensors: dict[str, torch.Tensor]) -> None:
        """Look at the weights of a pass: parameters, and codes or values as the program takes them,
        by name."""
        for name, declared in module.declared.items():
            codes, decoded = tensors.get(name + ".codes"), tensors.get(name + ".decoded")
            if declared.clip is None or codes is decoded is None:
                continue
            weight, clip = tensors[name].detach(), tensors[declared.clip].detach()
            weight = weight.t() if declared.in_out else weight
            form = module.quant.weight_form(name)
            codes = (
                decoded if codes is None else form.unpack(codes, weight.shape[1])[: weight.shape[0]]
            )
            outside = int((weight.abs() > clip[:, None]).sum())
            self._note(declared.clip, "weight", clip, codes, form, outside)

    def _note(
        self,
        clip_name: str,
        kind: str,
        clip: torch.Tensor,
        codes: torch.Tensor,
        form: Format | ScaledFormat | None,
        outside: int,
    ) -> None:
        """`codes`: of a ScaledFormat, values.

        `form`: None where scales are measured, and none is that of the clip.
        """
        bits = None if form is None else integer_bits(form)
        if isinstance(form, ScaledFormat) and bits is not None:
            codes = (codes / clip.view(-1, 1) * form.number.largest).round().nan_to_num()
        self._found[self._prefix + clip_name.removesuffix("_clip")] = TensorStatistics(
            kind=kind,
            clip=clip.mean().item(),
            clipped_share=outside / codes.numel(),
            zero_share=(codes == 0).sum().item() / codes.numel(),
            largest_code=None if bits is None else int(codes.abs().max()),
            bits=bits,
        )
