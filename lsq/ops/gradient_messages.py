"""Gradients as messages of int8 codes, their sums, and back: the steps of a quantised all-reduce.

A bucket of v values is cut into S shards of L values each, with zeros behind the v values. A shard
is a message of M bytes: codes, bfloat16 scales [B], zeros up to a multiple of 16 bytes. Each shard
begins a block, and its last block may be short.

The largest magnitude of a block gives its scale (arithmetic.gradient_scale): 0 where it vanishes,
NaN where a value is not finite. The scale is rounded up to a bfloat16. Codes are rounded to the
nearest, half to even. Sums add the products code * scale in order in float32, each product rounded
first: all devices and processes compute the same bits.

N messages, R rows or copies that are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from lsq.native.launch import FLOATS, check
from lsq.program.declare import AnyFloats, Bytes, Host, In, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.quant import GRADIENT, arithmetic

SHARD_MULTIPLE = 32
"""A shard has a multiple of this many values: the smallest block, aligned in every dtype."""
BLOCKS = (32, 64, 128, 256, 512, 1024)
_MESSAGE_MULTIPLE = 16
_SCALE_BYTES = torch.bfloat16.itemsize


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """The messages [S, M] of a bucket.

    Raises:
        ValueError: a field is out of bounds, or the shards do not hold the values.
    """

    values: int  # v, at least 1.
    shards: int = 1  # S, at least 1.
    length: int  # L: values of a shard, a multiple of SHARD_MULTIPLE; S * L is at least v.
    block: int = 128  # Values that share a scale, one of BLOCKS.

    def __post_init__(self):
        check(
            self.length % SHARD_MULTIPLE == 0,
            f"the length of a shard is {self.length}; it must be a multiple of {SHARD_MULTIPLE}:"
            " let MessageLayout.for_values choose it",
        )
        check(
            self.block in BLOCKS,
            f"block is {self.block!r}; it must be one of {', '.join(map(str, BLOCKS))}",
        )
        check(
            0 < self.values <= self.shards * self.length,
            f"{self.shards} shards of {self.length} do not hold {self.values} values, of which"
            " there must be some",
        )

    @classmethod
    def for_values(cls, values: int, shards: int, **fields) -> Self:
        """Return the layout with the shortest shards that hold `values` values; `fields`: the other
        ones."""
        needed = -(-values // max(1, shards))
        length = -(-needed // SHARD_MULTIPLE) * SHARD_MULTIPLE
        return cls(values=values, shards=shards, length=length, **fields)

    @property
    def blocks(self) -> int:
        """B, the blocks of a shard."""
        return -(-self.length // self.block)

    @property
    def message_bytes(self) -> int:
        """M, a multiple of 16."""
        used = self.length + _SCALE_BYTES * self.blocks
        return -(-used // _MESSAGE_MULTIPLE) * _MESSAGE_MULTIPLE

    def codes(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the codes of messages uint8 [..., M] as a view, int8 [..., L]."""
        return messages[..., : self.length].view(torch.int8)

    def scales(self, messages: torch.Tensor) -> torch.Tensor:
        """Return a view of the scales of messages uint8 [..., M]: bfloat16 [..., B], maybe NaN."""
        return messages[..., self.length : self.length + _SCALE_BYTES * self.blocks].view(
            torch.bfloat16
        )


class Messages(Value):
    """Messages of gradients; `layout` describes the messages of each shard."""

    layout: Host[MessageLayout]
    data: Bytes  # [..., M]

    @size
    def length(self) -> int:
        """L."""
        return self.layout.length

    @size
    def block(self) -> int:
        """Number of values that share a scale."""
        return self.layout.block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Reference: values float32 [S, L] -> messages uint8 [S, M]."""
        layout, (shards, length) = self.layout, values.shape
        whole = torch.nn.functional.pad(values, (0, layout.blocks * layout.block - length))
        largest = whole.view(shards, layout.blocks, layout.block).abs().amax(dim=-1)
        scale, reciprocal = message_scale(largest, GRADIENT.largest)
        codes = (values * _per_value(reciprocal, layout)).round()
        codes = codes.clamp(-GRADIENT.largest, GRADIENT.largest).nan_to_num(nan=0.0)
        shape = shards, layout.message_bytes
        messages = torch.zeros(shape, dtype=torch.uint8, device=values.device)
        layout.codes(messages).copy_(codes.to(torch.int8))
        # Copy bits: PyTorch converts NaN to one of several NaNs of bfloat16.
        layout.scales(messages).view(torch.int16).copy_(scale.view(torch.int32) >> 16)
        return messages

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [..., L]."""
        scales = self.layout.scales(self.data).to(torch.float32)
        return self.layout.codes(self.data).to(torch.float32) * _per_value(scales, self.layout)


class PackGradients(Operation):
    """The messages of the sum of R rows of gradients."""

    x: In[AnyFloats]  # [R, v], added up in order.
    messages: Out[Messages]  # [S, M]

    def __post_init__(self):
        layout = self.messages.layout
        require_shape("gradients to pack", self.x, ("at least one row", layout.values))
        require_shape("their messages", self.messages.data, (layout.shards, layout.message_bytes))

    rows = extent(0, "x")  # R.
    values = extent(1, "x")  # v.
    shards = extent(0, "messages.data")  # S.

    @size
    def dtype(self) -> int:
        return FLOATS[self.x.dtype]

    def reference(self):
        layout = self.messages.layout
        total = sum_in_order(self.x.unbind(0))
        whole = torch.nn.functional.pad(total, (0, layout.shards * layout.length - layout.values))
        data = self.messages.encode(whole.view(layout.shards, layout.length))
        return {"messages": {"data": data}}


class SumMessages(Operation):
    """The sum of N messages of one shard times a factor, rounded again, in the same layout."""

    messages: In[Messages]  # [N, M], added up in order.
    factor: float = 1.0  # For example 1 / world size.
    sum: Out[Messages]  # [M]

    def __post_init__(self):
        given, made = self.messages.layout, self.sum.layout
        check(
            (given.length, given.block) == (made.length, made.block),
            f"messages have shards of {given.length} values in blocks of {given.block}, their sum"
            f" {made.length} in blocks of {made.block}; give both the same layout of shards",
        )
        require_shape(
            "messages to add up", self.messages.data, ("at least one", given.message_bytes)
        )
        require_shape("their sum", self.sum.data, (made.message_bytes,))

    count = extent(0, "messages.data")  # N.

    def reference(self):
        total = sum_in_order(self.messages.decode().unbind(0)) * self.factor
        return {"sum": {"data": self.sum.encode(total[None])[0]}}


class UnpackGradients(Operation):
    """The values of messages: the sum of R copies times a factor, rounded once to x's dtype."""

    messages: In[Messages]  # [R, S, M], added up in order.
    factor: float = 1.0
    x: Out[AnyFloats]  # [v]

    def __post_init__(self):
        layout = self.messages.layout
        wanted = ("at least one copy", layout.shards, layout.message_bytes)
        require_shape("messages to unpack", self.messages.data, wanted)
        require_shape("their values", self.x, (layout.values,))

    copies = extent(0, "messages.data")  # R.
    shards = extent(1, "messages.data")  # S.
    values = extent(0, "x")  # v.

    @size
    def dtype(self) -> int:
        return FLOATS[self.x.dtype]

    def reference(self):
        x = sum_in_order(self.messages.decode().unbind(0)) * self.factor
        return {"x": x.flatten()[: self.values].to(self.x.dtype)}


def message_scale(largest: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradient_scale with scales rounded up to bfloat16, so that no value exceeds `code`."""
    scale, reciprocal = arithmetic.gradient_scale(largest, code)
    upwards = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    plain = reciprocal != 0
    inverse = torch.where(plain, torch.ones_like(scale) / upwards, 0.0)
    return torch.where(plain, upwards, scale), inverse


def require_shape(what: str, tensor, shape: tuple) -> None:
    """Raise ValueError for a tensor of another shape; a word in `shape` means any size above 0."""
    fits = len(tensor.shape) == len(shape) and all(
        found > 0 if isinstance(wanted, str) else found == wanted
        for found, wanted in zip(tensor.shape, shape, strict=True)
    )
    check(
        fits,
        f"{what} are {list(tensor.shape)}; the layout wants [{', '.join(map(str, shape))}]",
    )


def sum_in_order(terms) -> torch.Tensor:
    total = None
    for term in terms:
        total = term.to(torch.float32) if total is None else total + term.to(torch.float32)
    return total


def _per_value(of_blocks: torch.Tensor, layout: MessageLayout) -> torch.Tensor:
    """Expand [..., B] to [..., L]."""
    return of_blocks.repeat_interleave(layout.block, dim=-1)[..., : layout.length]
