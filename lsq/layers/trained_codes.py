"""Parameters that train as codes: int8 codes that products read, without float copies of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lsq.layers.coded_weight import CodedWeight, Codes, ReadOnly, Unread
from lsq.ops.compact_adam import MasterWeight, SplitWeight
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant.compact import LARGEST, join_weight
from lsq.run.backends import for_device

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)
ADVICE = (
    "lsq.train_codes keeps this weight as codes, without floats in memory: lsq.optim.Adam and copy_"
    " change it, lsq.revert(model) brings floats back"
)


@dataclass(frozen=True)
class FloatStorage:
    """The storage of codes, which reports the size of their floats: safetensors refuses a storage
    that is smaller than its tensor."""

    codes: torch.UntypedStorage
    floats: int

    def nbytes(self) -> int:
        return self.floats

    size = nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codes, name)


class TrainedCodes(CodedWeight):
    """A parameter that is rows of Codes and trains. Reading gives floats, of codes and remainders;
    `copy_` rounds to the nearest codes, and lsq.optim.Adam steps on the codes themselves.

    Views of whole rows share the codes. `new_zeros` of as many columns and the same dtype makes a
    CodesShard, since FSDP2 makes shards so.
    """

    advice = ADVICE
    _cast: tuple[weakref.ref, int] | None = None
    """The last copy of another dtype, and the version of the codes that it is of."""

    @staticmethod
    def parameter(codes: Codes, first: int, last: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(TrainedCodes(codes, first, last, dtype))

    @CodedWeight.data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._cast is not None:
            made, version = self._cast
            if made() is value and (value._version, self.codes.stored._version) == (0, version):
                value = self.read_as(value.dtype)  # nn.Module.to casts so; the codes stay
        CodedWeight.data.fset(self, value)

    def untyped_storage(self) -> FloatStorage:
        return FloatStorage(super().untyped_storage(), self.numel() * self.element_size())

    share_memory_ = ReadOnly.storage

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
        # nobody may read floats at data_ptr; FSDP2 does not, but takes no other parameters
        return sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.fsdp")

    def part(self, first: int, last: int) -> TrainedCodes:
        """Return some of its rows, which share the codes."""
        return TrainedCodes(self.codes, self.first + first, self.first + last, self.dtype)

    def shard(self, rows: int) -> CodesShard:
        """Make a shard of so many rows, of zeros. Raises ValueError: on the meta device."""
        stored, remainder, scale = self.codes.tensors
        if stored.is_meta:
            raise ValueError("codes on the meta device lack values; load them before fully_shard")
        codes = replace(
            self.codes,
            stored=stored.new_zeros(rows, stored.shape[1]),
            remainder=None if remainder is None else remainder.new_zeros(rows, stored.shape[1]),
            scale=scale.new_ones(rows),
            rows=rows,
        )
        return CodesShard(codes, 0, rows, self.whole)

    @property
    def whole(self) -> TrainedCodes:
        """This parameter as FSDP2 gathers it from shards."""
        return TrainedCodes(self.codes.gathered, self.first, self.last, self.dtype)

    def write_clip(self, clip: torch.Tensor) -> None:
        clip.copy_(self.codes.scale[: len(clip)] * LARGEST)

    def given(self, weight: Weight, made_of: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        *parts, clip = made_of
        if clip.requires_grad:
            raise ValueError(f"the clip of {weight.values.name} requires a gradient, but {ADVICE}")
        self.write_clip(clip.data)  # shards of clips are written from passes
        codes, scale, values = weight.codes.name, weight.scale.name, weight.values
        traced = Traced.apply(values, *parts)
        return {codes: self.codes.stored, scale: self.codes.scale, values.name: traced}

    def requires_grad_(self, requires_grad: bool = True) -> TrainedCodes:
        return torch.Tensor.requires_grad_(self, requires_grad)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        own, *others = arguments or (None,)
        if isinstance(own, TrainedCodes):
            view = _view(own, function, *others)
            if view is not None:
                return view
            same = set(options or ()) <= {"pin_memory"}
            if function is _aten.new_zeros.default and same and others[0][1:] == [own.shape[1]]:
                return own.shard(others[0][0])
        if function is _aten.copy_.default and isinstance(arguments[0], TrainedCodes):
            values = others[0]
            if values.shape != own.shape:
                values = values.expand(own.shape)
            own.encode(values)
            return own
        if function is _aten.embedding.default:
            words = others[0]
            rows = words.flatten()
            parts = [one if one is None else one.index_select(0, rows) for one in own.own]
            return join_weight(*parts).to(own.dtype).view(*words.shape, -1)
        if function in _COPIES:
            own.check_copy(**(options or {}))
            made = function(own.decode(), *others, **(options or {}))
            if made.dtype != own.dtype:
                own._cast = weakref.ref(made), own.codes.stored._version
            return made
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


class CodesShard(TrainedCodes):
    """A process's rows of TrainedCodes under FSDP2, and rows of padding after them.

    FSDP2 gathers codes that products read with their scales: K + 4 bytes for a row of K values.
    Remainders stay where they are.
    """

    @staticmethod
    def __new__(cls, codes: Codes, first: int, last: int, whole: TrainedCodes) -> CodesShard:
        made = CodedWeight.__new__(cls, codes, first, last, whole.dtype)
        made._whole = whole
        return made

    @property
    def whole(self) -> TrainedCodes:
        return self._whole

    def check_copy(self, device=None, dtype: torch.dtype | None = None, **_) -> None:
        super().check_copy(device)
        if dtype not in (None, self.dtype):
            raise RuntimeError(
                f"a shard of codes cannot become {dtype}: for activations give fully_shard"
                f" mp_policy=MixedPrecisionPolicy(param_dtype={dtype})"
            )

    def part(self, first: int, last: int) -> CodesShard:
        return CodesShard(self.codes, self.first + first, self.first + last, self.whole)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        # with more arguments FSDP2 would demand messages of as many columns as the weight
        codes = self.codes.stored, self.codes.scale[:, None]
        return (torch.cat([one.view(torch.uint8) for one in codes], 1),), None

    def fsdp_post_all_gather(
        self,
        messages: tuple[torch.Tensor, ...],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: TrainedCodes | None = None,
    ) -> tuple[TrainedCodes, tuple[torch.Tensor, ...]]:
        (message,), whole = messages, self.whole
        codes, columns, rows = whole.codes, whole.shape[1], slice(whole.first, whole.last)
        memory = codes.stored, codes.scale
        for one in memory if out is None else ():  # later, FSDP2 has given it memory
            one.untyped_storage().resize_(one.nbytes)
        # passes that await their backward have read the same codes, so versions stay
        stored, scale = (one.data for one in memory)
        stored[rows] = message[: len(whole), :columns].view(torch.int8)
        scale[rows] = message[: len(whole), columns:].contiguous().view(torch.float32)[:, 0]
        stored[codes.rows :], scale[codes.rows :] = 0, 1
        message.untyped_storage().resize_(0)  # until the next gather
        return TrainedCodes(codes, whole.first, whole.last, dtype), memory


class Flat(ReadOnly):
    """All values of TrainedCodes in one dimension, which are decoded when they are read."""

    advice = ADVICE

    @staticmethod
    def __new__(cls, codes: TrainedCodes) -> Flat:
        made = torch.Tensor._make_wrapper_subclass(
            cls, [codes.numel()], dtype=codes.dtype, device=codes.device
        )
        made.matrix, made.origin = codes, codes.origin
        return made

    @property
    def values(self) -> torch.Tensor:
        return self.matrix.decode().view(-1)


def _view(own: TrainedCodes, function, *given) -> TrainedCodes | list[TrainedCodes] | Flat | None:
    """Return a view that needs no floats; None: it is another one, or no view."""
    if function is _aten.detach.default:
        return own.part(0, len(own))
    if function is _aten.view.default:
        if given[0] == list(own.shape):
            return own.part(0, len(own))
        return Flat(own) if given[0] in ([-1], [own.numel()]) else None
    if function is _aten.as_strided.default and given[:2] == (list(own.shape), list(own.stride())):
        return own.part(0, len(own))
    if function is _aten.split.Tensor and given[1:] in ((), (0,)):
        ends = range(0, len(own), given[0])
        return [own.part(first, min(first + given[0], len(own))) for first in ends]
    if function is _aten.slice.Tensor and given[:1] in ((), (0,)) and given[3:] in ((), (1,)):
        first, last, _ = slice(*given[1:3] or (None,)).indices(len(own))
        return own.part(first, max(first, last))
    return None


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
