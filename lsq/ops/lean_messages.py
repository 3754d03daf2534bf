"""Gradients as messages of 4 to 5.5 bits a value, scales included: the codec `lean`.

A message holds a shard of L values in B = L / 32 blocks: planes of 32 bits [P], the top (uint16),
scales (uint8) [B], zeros up to a multiple of 16 bytes.

1. Scales are logarithms. Number g of the grid is 2^(g/8 - 127); a block gets the smallest number m
   that is not below its largest magnitude. The top is the largest g of the message. What travels of
   a block is 254 - (top - g); 0 and less become 0, a block that vanishes, as does one whose values
   all lie below SMALLEST_GRADIENT. 255 marks a block that holds NaN or a magnitude above 2^127: all
   its values become NaN.
2. Widths follow from scales, so no message says them. The width of scale k at level t is
   (k + t) / 16, rounded down: one more bit for every two octaves of m. Least squares would take one
   for each octave, but then blocks of small values get few, and Adam divides by their own size.
   That is also why a width is at least 3 unless k + t is negative: then it is 0. It is at most 8.
   t is the highest level at which the planes of all blocks fit; the first blocks, as many as still
   fit, have level t + 1.
3. Codes are companded. With q = 2^(w-1) - 1 the code of x is rint(q * (|x| / m)^0.75), and its bit
   w - 1 the sign of x. A block of width w is w planes: bit i of plane p is bit p of code i. A code
   c stands for m * (c / q)^(4/3).

Sums add values in order in float32, each rounded first. Square roots, products and sums are IEEE
754's in one order, so that every level of the C++ library makes the same bits. CUDA has no kernels
for these operations.

N messages, R rows or copies that are added up, S shards of a bucket of v values, M bytes of a
message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lsq.native.launch import FLOATS, check
from lsq.ops.gradient_messages import MessageLayout, PackGradients, SumMessages, UnpackGradients
from lsq.program.declare import AnyFloats, Bytes, Host, In, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.quant.arithmetic import SMALLEST_GRADIENT

BLOCK = 32
HIGHEST, NOT_FINITE = 254, 255
"""Scales of the blocks at the top, and of those that are not finite."""
LARGEST = 2.0**127
NARROWEST, WIDEST = 3, 8
EIGHTHS = torch.tensor([2 ** (j / 8) for j in range(8)]).view(torch.int32) & 0x7FFFFF
"""The grid within an octave, as mantissas of float32."""
LEVELS = torch.arange(-NOT_FINITE, 16 * WIDEST + 1)
"""From one at which all widths are 0 to one more than it takes to make all of them 8."""


def width_table() -> torch.Tensor:
    """Return the width at each level: int64 [256, levels], of every scale."""
    sixteenths = torch.arange(256)[:, None] + LEVELS
    widths = (sixteenths // 16).clamp(NARROWEST, WIDEST).where(sixteenths >= 0, 0)
    widths[[0, NOT_FINITE]] = 0
    return widths


def value_table() -> torch.Tensor:
    """Return what codes stand for where m = 1: float32 [9, 256], width and code."""
    values = torch.zeros(WIDEST + 1, 2**WIDEST)
    for width in range(NARROWEST, WIDEST + 1):
        q = 2 ** (width - 1) - 1
        positive = torch.tensor([(code / q) ** (4 / 3) for code in range(q + 1)])
        values[width, : 2 * q + 2] = torch.cat([positive, -positive])
    return values


WIDTHS, VALUES = width_table(), value_table()
PLANES = torch.arange(WIDEST)[:, None]


@dataclass(frozen=True, kw_only=True)
class LeanLayout(MessageLayout):
    """The messages [S, M] of a bucket.

    Raises:
        ValueError: a field is out of bounds, or the shards do not hold the values.
    """

    block: int = BLOCK
    bits: float  # Of a value, scales included: from 2 to 8.25, in quarters.

    def __post_init__(self):
        super().__post_init__()
        check(
            2 <= self.bits <= WIDEST + 0.25 and self.bits % 0.25 == 0 and self.block == BLOCK,
            f"a lean message has {self.bits} bits a value in blocks of {self.block}; take 2 to"
            f" {WIDEST}.25 bits, in quarters, and blocks of {BLOCK}",
        )

    @property
    def planes(self) -> int:
        """P, the planes that a message has room for."""
        return int((self.bits - 0.25) * self.blocks)

    @property
    def message_bytes(self) -> int:
        """M, a multiple of 16."""
        return -(-(4 * self.planes + 2 + self.blocks) // 16) * 16

    def parts(self, messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of messages uint8 [S, M]: planes int32 [S, P], tops int16 [S, 1], scales
        uint8 [S, B]."""
        end = 4 * self.planes
        planes, top, scales, _ = messages.split_with_sizes(
            [end, 2, self.blocks, self.message_bytes - end - 2 - self.blocks], 1
        )
        return planes.view(torch.int32), top.view(torch.int16), scales

    def widths(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the width of each block, int64 [S, B], from the scales."""
        k = scales.long()
        counts = torch.zeros(len(k), 256, dtype=torch.float64)
        counts.scatter_add_(1, k, torch.ones_like(counts[:1, :1]).expand(k.shape))
        fits = counts @ WIDTHS[:, :-1].double() <= self.planes
        level = fits.sum(1, keepdim=True) - 1
        low, high = WIDTHS[k, level], WIDTHS[k, level + 1]
        spare = self.planes - low.sum(1, keepdim=True)
        return torch.where((high - low).cumsum(1) <= spare, high, low)


class LeanMessages(Value):
    """Messages of the codec; `layout` describes those of each shard."""

    layout: Host[LeanLayout]
    data: Bytes  # [..., M]

    @size
    def length(self) -> int:
        """L."""
        return self.layout.length

    @size
    def planes(self) -> int:
        """P."""
        return self.layout.planes

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Reference: values float32 [S, L] -> messages uint8 [S, M]."""
        layout = self.layout
        x = values.view(-1, layout.blocks, BLOCK)
        largest = x.abs().amax(-1)
        finite, vanishes = largest <= LARGEST, largest < SMALLEST_GRADIENT
        bits = largest.view(torch.int32).long()
        g = 8 * (bits >> 23) + (EIGHTHS < (bits & 0x7FFFFF)[..., None]).sum(-1)
        top = g.where(finite & ~vanishes, 0).amax(1, keepdim=True)
        scales = (HIGHEST - top + g).clamp(min=0).where(~vanishes, 0).where(finite, NOT_FINITE)
        widths = layout.widths(scales)[..., None]
        half = 1 << (widths - 1).clamp(min=0)
        root = (x.abs() * (1 / on_grid(g))[..., None]).sqrt()
        codes = (root * root.sqrt() * (half - 1)).round().where(widths > 0, 0).long()
        codes += half * x.signbit()
        messages = torch.zeros(len(x), layout.message_bytes, dtype=torch.uint8)
        planes, tops, sent = layout.parts(messages)
        tops.copy_(top)
        sent.copy_(scales)
        every = ((codes[..., None, :] >> PLANES & 1) << torch.arange(BLOCK)).sum(-1)
        for shard, taken in enumerate(PLANES[:, 0] < widths):
            planes[shard, : taken.sum()] = every[shard][taken].to(torch.int32)
        return messages

    def decode(self) -> torch.Tensor:
        """Reference: the values, float32 [..., L]."""
        layout, outer = self.layout, self.data.shape[:-1]
        planes, tops, scales = layout.parts(self.data.reshape(-1, layout.message_bytes))
        widths = layout.widths(scales)[..., None]
        every = torch.zeros(len(scales), layout.blocks, WIDEST, dtype=torch.int64)
        for shard, taken in enumerate(PLANES[:, 0] < widths):
            every[shard][taken] = planes[shard, : taken.sum()].long()
        codes = ((every[..., None] >> torch.arange(BLOCK) & 1) << PLANES).sum(-2)
        g = (tops + scales.long() - HIGHEST).clamp(min=0)  # of blocks that vanish, m is 0
        m = on_grid(g).where(scales != NOT_FINITE, torch.nan)
        return (VALUES[widths, codes] * m[..., None]).view(*outer, layout.length)


def on_grid(g: torch.Tensor) -> torch.Tensor:
    """Return numbers of the grid, float32."""
    return (g >> 3 << 23 | EIGHTHS[g & 7]).to(torch.int32).view(torch.float32)


class PackLean(Operation):
    """The messages of the sum of R rows of gradients."""

    x: In[AnyFloats]  # [R, v], added up in order.
    messages: Out[LeanMessages]  # [S, M]

    rows = extent(0, "x")  # R.
    values = extent(1, "x")  # v.
    shards = extent(0, "messages.data")  # S.

    @size
    def dtype(self) -> int:
        return FLOATS[self.x.dtype]

    __post_init__ = PackGradients.__post_init__
    reference = PackGradients.reference


class SumLean(Operation):
    """The sum of N messages of one shard times a factor, rounded again."""

    messages: In[LeanMessages]  # [N, M], added up in order.
    factor: float = 1.0  # For example 1 / world size.
    sum: Out[LeanMessages]  # [M], perhaps of other bits.

    count = extent(0, "messages.data")  # N.

    __post_init__ = SumMessages.__post_init__
    reference = SumMessages.reference


class UnpackLean(Operation):
    """The values of messages: the sum of R copies times a factor, rounded once to x's dtype."""

    messages: In[LeanMessages]  # [R, S, M], added up in order.
    factor: float = 1.0
    x: Out[AnyFloats]  # [v]

    copies = extent(0, "messages.data")  # R.
    shards = extent(1, "messages.data")  # S.
    values = extent(0, "x")  # v.

    @size
    def dtype(self) -> int:
        return FLOATS[self.x.dtype]

    __post_init__ = UnpackGradients.__post_init__
    reference = UnpackGradients.reference
