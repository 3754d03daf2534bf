"""Parameters kept as codes alone: reading gives decoded values, writing raises an error.

lsq.freeze makes CodedWeight, lsq.train_codes TrainedCodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant import WeightFormat

ADVICE = (
    "lsq.freeze keeps this weight as codes alone, without floats in memory, and nothing can write"
    " to it: call lsq.revert(model) to train, load or merge weights;"
    " lsq.models.float_state_dict(model) has floats to save"
)
_SHARED = (
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
)
"""Operations whose result shares the codes, which never change."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """The codes of one weight [N, K] of a program, which may join several parameters."""

    format: WeightFormat
    stored: torch.Tensor
    """int8 [P, stored columns], P at least N."""
    scale: torch.Tensor
    """float32 [P]"""
    rows: int
    columns: int
    in_out: bool
    """Whether the parameter is [K, N]; the weight then is a single parameter."""
    remainder: torch.Tensor | None = None
    """int8 [P, K] of a weight that trains (lsq.quant.compact); products do not read it."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        return self.stored, self.remainder, self.scale

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors if one is not None)

    @cached_property
    def gathered(self) -> Codes:
        """Codes of the same shape, without remainders, that FSDP2 gathers from shards. They have
        memory between a gather and the release of it."""
        parts = torch.empty_like(self.stored), torch.empty_like(self.scale)
        for part in parts:
            part.untyped_storage().resize_(0)
        return replace(self, stored=parts[0], scale=parts[1], remainder=None)

    def decode(self, first: int, last: int) -> torch.Tensor:
        """Decode rows `first` to `last` (excluded): float32 in the layout of the parameter."""
        codes = self.format.unpack(self.stored[first:last], self.columns)
        values = codes * self.scale[first:last, None]
        return values.t().contiguous() if self.in_out else values


class Unread(torch.Tensor):
    """A shape without memory, in place of a weight's floats: the program reads its codes."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: VirtualTensor | Unread) -> Unread:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device="cpu"
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:  # as gradient checkpointing saves it
            return Unread(*arguments)
        raise RuntimeError(f"{function} reads floats of a weight that is codes alone")

    def to(self, *_) -> Unread:
        return self  # it has the dtype of the program

    contiguous = to


class ReadOnly(torch.Tensor):
    """A tensor that can be read, not written: a view of a weight that is codes alone."""

    advice = ADVICE
    origin: int | None = None
    """Stands for the address of its memory's first value, so that shared weights are found."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> ReadOnly:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )
        made.values = values
        return made

    def decode(self) -> torch.Tensor:
        return self.values

    def view_of(self, values: torch.Tensor) -> ReadOnly:
        made = ReadOnly(values)
        made.advice, made.origin = self.advice, self.origin
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        options, schema = options or {}, function._schema
        given = {
            one.name: value for one, value in zip(schema.arguments, arguments, strict=False)
        } | options
        aliased = [
            (one.alias_info, value)
            for one in schema.arguments
            if one.alias_info
            for value in tree_leaves(given.get(one.name))
            if isinstance(value, ReadOnly)
        ]
        for info, value in aliased:
            if info.is_write:
                raise RuntimeError(f"{function.name()} would write here: {value.advice}")
        arguments, options = tree_map_only(ReadOnly, lambda one: one.decode(), (arguments, options))
        if schema.is_mutable:
            return function(*arguments, **options)
        with torch.inference_mode(False):  # a view of a normal tensor must be a normal one
            found = function(*arguments, **options)
            return tree_map_only(torch.Tensor, aliased[0][1].view_of, found) if aliased else found

    # Accesses that PyTorch does not dispatch

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        own = getattr(self, "codes", None)
        if own is None or getattr(value, "codes", None) is not own:
            raise RuntimeError(f".data cannot be set: {self.advice}")
        torch.Tensor.data.__set__(self, value)  # as nn.Module.to does for another dtype

    @property
    def requires_grad(self) -> bool:
        return torch.Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ReadOnly:
        if requires_grad and isinstance(self, nn.Parameter):  # a detached copy may
            raise RuntimeError(f"it cannot require a gradient: {self.advice}")
        return super().requires_grad_(requires_grad)

    def __setitem__(self, *_):
        raise RuntimeError(f"no value can be set: {self.advice}")

    def contiguous(self, **_) -> torch.Tensor:
        return self.decode().contiguous()

    def data_ptr(self, **_) -> int:
        if self.origin is None:
            self.storage()
        return self.origin + self.decoded_offset()

    def decoded_offset(self) -> int:
        return self.values.storage_offset()

    def storage(self, **_):
        raise RuntimeError(f"there is no address of floats: {self.advice}")

    __dlpack__ = __dlpack_device__ = storage

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def __repr__(self, **_) -> str:
        return repr(self.decode())


class CodedWeight(ReadOnly):
    """A parameter that is rows of Codes; copies share the codes, and `.to` changes the dtype."""

    @staticmethod
    def __new__(cls, codes: Codes, first: int, last: int, dtype: torch.dtype) -> CodedWeight:
        shape = (codes.columns, last - first) if codes.in_out else (last - first, codes.columns)
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.stored.device
        )
        made.codes, made.first, made.last = codes, first, last
        return made

    @staticmethod
    def parameter(codes: Codes, first: int, last: int, dtype: torch.dtype) -> nn.Parameter:
        """Make the parameter that modules hold."""
        return nn.Parameter(CodedWeight(codes, first, last, dtype), requires_grad=False)

    @staticmethod
    def joined(parts: Sequence[torch.Tensor]) -> CodedWeight | None:
        """Join parts of one weight; None if all are floats, ValueError if a part was replaced."""
        coded = [part for part in parts if isinstance(part, CodedWeight)]
        if not coded:
            return None
        ends, codes = [0, *(part.last for part in coded)], coded[0].codes
        together = len(coded) == len(parts) and all(part.codes is codes for part in coded)
        if not together or ends[:-1] != [part.first for part in coded] or ends[-1] != codes.rows:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise ValueError(
                f"parameters {shapes} of one product are no longer those that became codes:"
                f" {coded[0].advice}"
            )
        return type(coded[0])(codes, 0, ends[-1], coded[0].dtype)

    def decode(self) -> torch.Tensor:
        return self.codes.decode(self.first, self.last).to(self.dtype)

    def check_copy(self, device: torch.device | None = None, **_) -> None:
        """Raise RuntimeError if a copy by these options would be on another device."""
        if torch.device(device or self.device) != self.device:
            raise RuntimeError(f"it cannot go to {device}: {self.advice}")

    def read_as(self, dtype: torch.dtype) -> CodedWeight:
        """Return a tensor of the same codes that reads as `dtype`."""
        return type(self)(self.codes, self.first, self.last, dtype)

    def write_clip(self, clip: torch.Tensor) -> None:
        """Write the clips [N] of these codes, unless they stay as they were."""

    def given(self, weight: Weight, made_of: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the program's inputs for this weight; ValueError if a part of it is trained."""
        if any(one.requires_grad for one in made_of):
            raise ValueError(f"{weight.values.name} or its clip requires a gradient, but {ADVICE}")
        codes, scale, values = weight.codes.name, weight.scale.name, weight.values
        return {codes: self.codes.stored, scale: self.codes.scale, values.name: Unread(values)}

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function not in _SHARED:
            return super().__torch_dispatch__(function, types, arguments, options)
        (own,), options = arguments, options or {}
        own.check_copy(**options)
        with torch.inference_mode(False):
            return CodedWeight(own.codes, own.first, own.last, options.get("dtype") or own.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage of its rows of codes alone, so that parts of a weight share none."""
        return torch.from_dlpack(self.codes.stored[self.first : self.last]).untyped_storage()

    def __deepcopy__(self, memo):
        memo[id(self)] = found = CodedWeight.parameter(
            self.codes, self.first, self.last, self.dtype
        )
        return found

    def __reduce_ex__(self, protocol):
        return CodedWeight.parameter, (self.codes, self.first, self.last, self.dtype)

    def __repr__(self, **_) -> str:
        return f"CodedWeight({list(self.shape)}, {self.dtype}, kept as {self.codes.format.name})"


@torch.inference_mode(False)
def decode_all(module: nn.Module) -> None:
    """Decode the parameters of `module` itself to floats."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, CodedWeight):
            module._parameters[name] = nn.Parameter(parameter.decode(), parameter.requires_grad)
