"""Gradients as messages of int8 codes, their sums, and back.

What a quantised all-reduce does between its collectives. MessageLayout (gradient_layout.py) says
how a message lies in memory. A block's largest magnitude gives its scale, as
arithmetic.gradient_scale has it: 0 where it vanishes, NaN where a value is not finite, so that
overflow reaches everyone. It is rounded up to a bfloat16: blocks half as long, for the bytes of a
float32, lose less. Codes are the nearest ones, half to even. Sums are float32 sums in order of the
products code * scale, each rounded before it is added: all devices and all processes compute the
same bits.

v values, S shards, L values of a shard, M bytes of a message, N messages, R rows or copies that are
added up.
"""

from __future__ import annotations

import torch

from lsq.native.launch import FLOATS, check
from lsq.ops.gradient_layout import MessageLayout
from lsq.program.declare import AnyFloats, Bytes, Host, In, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.quant import GRADIENT, arithmetic


class Messages(Value):
    """Messages of gradients. A layout of several shards tells of the messages of each."""

    layout: Host[MessageLayout]
    data: Bytes
    """[..., M]"""

    @size
    def length(self) -> int:
        """L."""
        return self.layout.length

    @size
    def block(self) -> int:
        """Values that share a scale."""
        return self.layout.block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Reference: values float32 [S, L] -> messages uint8 [S, M]."""
        layout, (shards, length) = self.layout, values.shape
        whole = torch.nn.functional.pad(values, (0, layout.blocks * layout.block - length))
        largest = whole.view(shards, layout.blocks, layout.block).abs().amax(dim=-1)
        scale, reciprocal = message_scale(largest, GRADIENT.largest)
        codes = (values * _per_value(reciprocal, layout)).round()
        codes = codes.clamp(-GRADIENT.largest, GRADIENT.largest).nan_to_num(nan=0.0)
        messages = torch.zeros(
            shards, layout.message_bytes, dtype=torch.uint8, device=values.device
        )
        layout.codes(messages).copy_(codes.to(torch.int8))
        # Bits, not values: PyTorch has several NaNs in bfloat16.
        layout.scales(messages).view(torch.int16).copy_(scale.view(torch.int32) >> 16)
        return messages

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [..., L]."""
        return self.layout.codes(self.data).to(torch.float32) * _per_value(
            self.layout.scales(self.data).to(torch.float32), self.layout
        )


class PackGradients(Operation):
    """The messages of the sum of R rows of gradients.

    Raises:
        ValueError: a tensor has another shape or dtype than the layout of the messages wants.
    """

    x: In[AnyFloats]
    """[R, v], added up in order."""
    messages: Out[Messages]
    """[S, M]"""

    def __post_init__(self):
        layout = self.messages.layout
        _require("gradients to pack", self.x, ("at least one row", layout.values), FLOATS)
        _require(
            "their messages",
            self.messages.data,
            (layout.shards, layout.message_bytes),
            [torch.uint8],
        )

    rows = extent(0, "x")
    """R."""
    values = extent(1, "x")
    """v."""
    shards = extent(0, "messages.data")
    """S."""

    @size
    def dtype(self) -> int:
        """The dtype of x, see FLOATS."""
        return FLOATS[self.x.dtype]

    def reference(self):
        layout = self.messages.layout
        total = _sum_in_order(self.x.unbind(0))
        whole = torch.nn.functional.pad(total, (0, layout.shards * layout.length - layout.values))
        return {
            "messages": {"data": self.messages.encode(whole.view(layout.shards, layout.length))}
        }


class SumMessages(Operation):
    """The sum of N messages of one shard times a factor, rounded anew.

    Raises:
        ValueError: a tensor has another shape or dtype than its layout wants, or the layouts
            differ.
    """

    messages: In[Messages]
    """[N, M], added up in order."""
    factor: float = 1.0
    """E.g. 1 / world size."""
    sum: Out[Messages]
    """[M]"""

    def __post_init__(self):
        given, made = self.messages.layout, self.sum.layout
        check(
            (given.length, given.block) == (made.length, made.block),
            f"messages have shards of {given.length} values in blocks of {given.block}, their sum"
            f" {made.length} in "
            f"blocks of {made.block}; only the bits may differ",
        )
        _require(
            "messages to add up",
            self.messages.data,
            ("at least one", given.message_bytes),
            [torch.uint8],
        )
        _require("their sum", self.sum.data, (made.message_bytes,), [torch.uint8])

    count = extent(0, "messages.data")
    """N."""

    def reference(self):
        total = _sum_in_order(self.messages.decode().unbind(0)) * self.factor
        return {"sum": {"data": self.sum.encode(total[None])[0]}}


class UnpackGradients(Operation):
    """The values of messages: the sum of R copies times a factor, rounded once to the dtype of x.

    Raises:
        ValueError: a tensor has another shape or dtype than the layout of the messages wants.
    """

    messages: In[Messages]
    """[R, S, M], added up in order."""
    factor: float = 1.0
    x: Out[AnyFloats]
    """[v]"""

    def __post_init__(self):
        layout = self.messages.layout
        wanted = ("at least one copy", layout.shards, layout.message_bytes)
        _require("messages to unpack", self.messages.data, wanted, [torch.uint8])
        _require("their values", self.x, (layout.values,), FLOATS)

    copies = extent(0, "messages.data")
    """R."""
    shards = extent(1, "messages.data")
    """S."""
    values = extent(0, "x")
    """v."""

    @size
    def dtype(self) -> int:
        """The dtype of x, see FLOATS."""
        return FLOATS[self.x.dtype]

    def reference(self):
        x = _sum_in_order(self.messages.decode().unbind(0)) * self.factor
        return {"x": x.flatten()[: self.values].to(self.x.dtype)}


def message_scale(largest: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """arithmetic.gradient_scale with the scale rounded up to a bfloat16 (float32), so that no value
    exceeds `code`."""
    scale, reciprocal = arithmetic.gradient_scale(largest, code)
    upwards = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    plain = reciprocal != 0
    return torch.where(plain, upwards, scale), torch.where(
        plain, torch.ones_like(scale) / upwards, 0.0
    )


def _require(what: str, tensor, shape: tuple, dtypes) -> None:
    """Refuse a tensor of another shape or dtype; a word in `shape` stands for any number above
    0."""
    fits = len(tensor.shape) == len(shape) and all(
        found > 0 if isinstance(wanted, str) else found == wanted
        for found, wanted in zip(tensor.shape, shape, strict=True)
    )
    check(
        fits and tensor.dtype in dtypes,
        f"{what} are {tensor.dtype} {list(tensor.shape)}; the layout wants"
        f" [{', '.join(map(str, shape))}] of "
        f"{' or '.join(map(str, dtypes))}",
    )


def _sum_in_order(terms) -> torch.Tensor:
    total = None
    for term in terms:
        total = term.to(torch.float32) if total is None else total + term.to(torch.float32)
    return total


def _per_value(of_blocks: torch.Tensor, layout: MessageLayout) -> torch.Tensor:
    """[..., B] -> [..., L]."""
    return of_blocks.repeat_interleave(layout.block, dim=-1)[..., : layout.length]
