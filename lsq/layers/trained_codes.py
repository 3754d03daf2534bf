"""Parameters that train as codes: int8 codes that products read, without float copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from lsq.layers.coded_weight import CodedWeight, Codes, Unread
from lsq.ops.compact_adam import MasterWeight, SplitWeight
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant.compact import LARGEST, join_weight
from lsq.run.backends import for_device

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
ADVICE = (
    "lsq.train_codes keeps this weight as codes, without floats in memory: lsq.optim.Adam and copy_"
    " change it, lsq.revert(model) brings floats back"
)


class TrainedCodes(CodedWeight):
    """A parameter that is rows of Codes and trains. Reading gives floats, of codes and remainders;
    `copy_` rounds to the nearest codes, and lsq.optim.Adam steps on the codes themselves."""

    advice = ADVICE

    @staticmethod
    def parameter(codes: Codes, first: int, last: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(TrainedCodes(codes, first, last, dtype))

    @property
    def origin(self) -> int:
        return self.own[0].data_ptr()

    def decoded_offset(self) -> int:
        return 0

    @property
    def own(self) -> list[torch.Tensor | None]:
        """This parameter's rows of codes, remainders and scales."""
        rows = slice(self.first, self.last)
        return [None if one is None else one[rows] for one in self.codes.tensors]

    @property
    def master(self) -> MasterWeight:
        """This parameter as a step of Adam changes it."""
        codes, remainder, scale = self.own
        return MasterWeight(codes=codes, remainder=remainder, scale=scale)

    def decode(self) -> torch.Tensor:
        return join_weight(*self.own).to(self.dtype)

    @torch.no_grad()
    def encode(self, values: torch.Tensor) -> None:
        """Round float values [N, K] to the nearest codes."""
        plain = values.to(torch.float32).contiguous()
        for_device(plain.device).run(SplitWeight(values=plain, weight=self.master))
        self.changed()

    def changed(self) -> None:
        """Note that codes have changed: a backward pass that awaits the old ones is an error."""
        torch.autograd.graph.increment_version([self, self.codes.stored])

    def is_contiguous(self, *_, **__) -> bool:
        return False  # nobody may read floats at data_ptr

    def write_clip(self, clip: torch.Tensor) -> None:
        clip.copy_(self.codes.scale[: len(clip)] * LARGEST)

    def given(self, weight: Weight, made_of: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        *parts, clip = made_of
        if clip.requires_grad:
            raise ValueError(f"the clip of {weight.values.name} requires a gradient, but {ADVICE}")
        codes, scale, values = weight.codes.name, weight.scale.name, weight.values
        traced = Traced.apply(values, *parts)
        return {codes: self.codes.stored, scale: self.codes.scale, values.name: traced}

    def requires_grad_(self, requires_grad: bool = True) -> TrainedCodes:
        return torch.Tensor.requires_grad_(self, requires_grad)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            (own,) = arguments
            return TrainedCodes(own.codes, own.first, own.last, own.dtype)
        if function is torch.ops.aten.copy_.default and isinstance(arguments[0], TrainedCodes):
            own, values = arguments[:2]
            if values.shape != own.shape:
                values = values.expand(own.shape)
            own.encode(values)
            return own
        if function is torch.ops.aten.embedding.default:
            own, words = arguments[:2]
            rows = words.flatten()
            parts = [one if one is None else one.index_select(0, rows) for one in own.own]
            return join_weight(*parts).to(own.dtype).view(*words.shape, -1)
        if function in _COPIES:
            own, *others = arguments
            return function(own.decode(), *others, **(options or {}))
        return super().__torch_dispatch__(function, types, arguments, options)

    def __deepcopy__(self, memo):
        # parameters of one product share their codes, in a copy too
        codes = memo.get(id(self.codes))
        if codes is None:
            parts = [None if one is None else one.clone() for one in self.codes.tensors]
            named = dict(zip(("stored", "remainder", "scale"), parts, strict=True))
            codes = memo[id(self.codes)] = replace(self.codes, **named)
        found = TrainedCodes.parameter(codes, self.first, self.last, self.dtype)
        memo[id(self)] = found.requires_grad_(self.requires_grad)
        return found

    def __reduce_ex__(self, protocol):
        values = self.decode()  # files hold floats, which anybody reads
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)


class Traced(torch.autograd.Function):
    """A shape without memory for the program's graph; its gradient flows to the parts of the
    weight."""

    @staticmethod
    def forward(ctx, values: VirtualTensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = list(map(len, parts))
        return Unread(values)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return None, *gradient.split(ctx.rows)
