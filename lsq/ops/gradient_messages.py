"""Gradients as messages of 8 or 4 bits a value, their sums, and back.

What a quantised all-reduce does between its collectives. MessageLayout (gradient_layout.py) says
how a message lies in memory. A block's largest magnitude gives its scale, as
arithmetic.gradient_scale has it: 0 where it vanishes, NaN where a value is not finite, so that
overflow reaches everyone. It is rounded up to a bfloat16: blocks half as long, for the bytes of a
float32, lose less. Sums are float32 sums in order of the products code * scale, each rounded before
it is
added: all devices and all processes compute the same bits.

v values, S shards, L values of a shard, M bytes of a message, N messages, R rows or copies that are
added up.
"""

from __future__ import annotations

import torch

from lsq.native.launch import FLOATS, check
from lsq.ops.gradient_layout import MessageLayout
from lsq.program.declare import AnyFloats, Bytes, Floats, Host, In, Key, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.quant import arithmetic
from lsq.quant.random import uniform


class Messages(Value):
    """Messages of gradients. A layout of several shards tells of the messages of each."""

    layout: Host[MessageLayout]
    data: Bytes  # [..., M]

    @size
    def length(self) -> int:
        """L."""
        return self.layout.length

    @size
    def block(self) -> int:
        """Values that share a scale."""
        return self.layout.block

    @size
    def bits(self) -> int:
        """Width of a code."""
        return self.layout.bits

    def encode(self, values: torch.Tensor, key: torch.Tensor | None, subsequence: int):
        """Reference: values float32 [S, L] -> messages uint8 [S, M], error float32 [S, L]."""
        layout, (shards, length) = self.layout, values.shape
        whole = torch.nn.functional.pad(values, (0, layout.blocks * layout.block - length))
        largest = whole.view(shards, layout.blocks, layout.block).abs().amax(dim=-1)
        scale, reciprocal = message_scale(largest, layout.largest_code)
        scaled = values * _per_value(reciprocal, layout)
        if key is None:
            rounded = scaled.round()
        else:
            rounded = (
                scaled + uniform(key, subsequence, (shards, length)).to(values.device)
            ).floor()
        codes = (
            rounded.clamp(-layout.largest_code, layout.largest_code)
            .nan_to_num(nan=0.0)
            .to(torch.int8)
        )
        scales = _per_value(scale, layout)
        error = torch.where(scales.isfinite(), values - codes.to(torch.float32) * scales, 0.0)
        if layout.bits == 4:
            codes = (codes[:, 0::2] & 15) | codes[:, 1::2].bitwise_left_shift(4)
        messages = torch.zeros(
            shards, layout.message_bytes, dtype=torch.uint8, device=values.device
        )
        layout.codes(messages).copy_(codes)
        # Bits, not values: PyTorch has several NaNs in bfloat16.
        layout.scales(messages).view(torch.int16).copy_(scale.view(torch.int32) >> 16)
        return messages, error

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [..., L]."""
        codes = self.layout.codes(self.data)
        if self.layout.bits == 4:
            # A shift to the left drops what stands in the high half; one to the right keeps the
            # sign.
            codes = torch.stack([codes.bitwise_left_shift(4) >> 4, codes >> 4], dim=-1).flatten(-2)
        return codes.to(torch.float32) * _per_value(
            self.layout.scales(self.data).to(torch.float32), self.layout
        )


class PackGradients(Operation):
    """The messages of the sum of R rows of gradients.

    Raises:
        ValueError: a tensor has another shape or dtype than the layout of the messages wants.
    """

    x: In[AnyFloats]  # [R, v], added up in order.
    key: In[Key] | None
    """Values are rounded up with a probability equal to the fraction, drawn for value i at element
    i; None: to the nearest code, half to even.
    """
    subsequence: int = 0
    messages: Out[Messages]  # [S, M]
    error: Out[Floats] | None
    """[v], value - code * scale; 0 in blocks that are not finite.

    It may be the memory of x float32 [1, v].
    """

    def __post_init__(self):
        layout = self.messages.layout
        _require("gradients to pack", self.x, ("at least one row", layout.values), FLOATS)
        _require(
            "their messages",
            self.messages.data,
            (layout.shards, layout.message_bytes),
            [torch.uint8],
        )
        if self.error is not None:
            _require("their error", self.error, (layout.values,), [torch.float32])

    rows = extent(0, "x")  # R.
    values = extent(1, "x")  # v.
    shards = extent(0, "messages.data")  # S.

    @size
    def dtype(self) -> int:
        """The dtype of x, see FLOATS."""
        return FLOATS[self.x.dtype]

    def reference(self):
        layout = self.messages.layout
        total = _sum_in_order(self.x.unbind(0))
        whole = torch.nn.functional.pad(total, (0, layout.shards * layout.length - layout.values))
        messages, rest = self.messages.encode(
            whole.view(layout.shards, layout.length), self.key, self.subsequence
        )
        return {"messages": {"data": messages}, "error": rest.flatten()[: layout.values]}


class SumMessages(Operation):
    """The sum of N messages of one shard times a factor, rounded anew.

    Raises:
        ValueError: a tensor has another shape or dtype than its layout wants, or the layouts differ
            in more than bits.
    """

    messages: In[Messages]  # [N, M], added up in order.
    factor: float = 1.0  # E.g. 1 / world size.
    key: In[Key] | None  # As in PackGradients; value i of the shard draws element i.
    subsequence: int = 0
    sum: Out[Messages]  # [M']

    def __post_init__(self):
        given, made = self.messages.layout, self.sum.layout
        check(
            (given.length, given.block) == (made.length, made.block),
            f"messages have shards of {given.length} values in blocks of {given.block}, their sum"
            f" {made.length} in blocks of {made.block}; only the bits may differ",
        )
        _require(
            "messages to add up",
            self.messages.data,
            ("at least one", given.message_bytes),
            [torch.uint8],
        )
        _require("their sum", self.sum.data, (made.message_bytes,), [torch.uint8])

    count = extent(0, "messages.data")  # N.

    def reference(self):
        total = _sum_in_order(self.messages.decode().unbind(0)) * self.factor
        messages, _ = self.sum.encode(total[None], self.key, self.subsequence)
        return {"sum": {"data": messages[0]}}


class UnpackGradients(Operation):
    """The values of messages: the sum of R copies times a factor, rounded once to the dtype of x.

    Raises:
        ValueError: a tensor has another shape or dtype than the layout of the messages wants.
    """

    messages: In[Messages]  # [R, S, M], added up in order.
    factor: float = 1.0
    x: Out[AnyFloats]  # [v]

    def __post_init__(self):
        layout = self.messages.layout
        wanted = ("at least one copy", layout.shards, layout.message_bytes)
        _require("messages to unpack", self.messages.data, wanted, [torch.uint8])
        _require("their values", self.x, (layout.values,), FLOATS)

    copies = extent(0, "messages.data")  # R.
    shards = extent(1, "messages.data")  # S.
    values = extent(0, "x")  # v.

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
        f" [{', '.join(map(str, shape))}] of {' or '.join(map(str, dtypes))}",
    )


def _sum_in_order(terms) -> torch.Tensor:
    total = None
    for term in terms:
        total = term.to(torch.float32) if total is None else total + term.to(torch.float32)
    return total


def _per_value(of_blocks: torch.Tensor, layout: MessageLayout) -> torch.Tensor:
    """[..., B] -> [..., L]."""
    return of_blocks.repeat_interleave(layout.block, dim=-1)[..., : layout.length]
