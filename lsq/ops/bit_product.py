"""Codes of 1 to 8 bits as stacked planes, and their exact products (QGTC, Wang et al., PPoPP 2022).

Plane i holds bit i of every code, 32 codes of a line in a word, the first in the lowest bit. Lines
are the rows of the left operand a [M, K] and the columns of the right one b [K, N]:

    a @ b = sum over planes i, j of 2^(i + j) * popcount(a_i & b_j)

The highest plane of codes in two's complement counts negatively. Products may also be made from
bytes, with the same sums. M rows, N columns, K inputs; L lines and W words of a line.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Bytes, Codes, Floats, In, Integers, Out, Value, extent, size
from lsq.program.operation import Operation

WORD = 32  # Codes of a line in a word.
TILE = (8, 128)  # Lines and codes of the tiles to whole numbers of which planes are padded.


def padded_shape(lines: int, depth: int, bits: int, by_column: bool) -> tuple[int, int, int]:
    """Return the shape of planes uint8 of so many lines of `depth` codes."""
    lines, words = (-(-n // step) * step for n, step in zip((lines, depth), TILE, strict=True))
    words //= WORD
    return (bits, words, 4 * lines) if by_column else (bits, lines, 4 * words)


class BitMatrix(Value):
    """Planes of a matrix; what lies beyond its edges is zero."""

    planes: Bytes  # [B, L, 4 * W] or [B, W, 4 * L]. The second `by_column`.
    is_signed: bool  # Whether the highest plane counts negatively.
    by_column: bool  # Whether lines are columns, as of a right operand.

    bits = extent(0, "planes")

    @size
    def lines(self) -> int:
        return self.planes.shape[2] // 4 if self.by_column else self.planes.shape[1]

    @size
    def words(self) -> int:
        return self.planes.shape[1] if self.by_column else self.planes.shape[2] // 4

    def codes(self) -> torch.Tensor:
        """Reference: the codes of all lines, whole numbers int32 [L, 32 * W]."""
        words = self.planes.view(torch.int32)
        words = words.transpose(1, 2) if self.by_column else words
        shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
        planes = (words[..., None] >> shifts & 1).flatten(2)
        weights = [1 << plane for plane in range(self.bits)]
        weights[-1] *= -1 if self.is_signed else 1
        return sum(weight * plane for weight, plane in zip(weights, planes, strict=True))

    def pack(self, codes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Reference: the written field, for codes int32 of rows and columns."""
        lines = codes.t() if self.by_column else codes
        below = (0, self.words * WORD - lines.shape[1], 0, self.lines - len(lines))
        lines = torch.nn.functional.pad(lines, below)
        planes = torch.stack([lines >> plane & 1 for plane in range(self.bits)])
        shifts = torch.arange(WORD, device=codes.device)
        words = (planes.long().unflatten(2, (self.words, WORD)) << shifts).sum(3)
        words = words.transpose(1, 2) if self.by_column else words
        signed = torch.where(words < 2**31, words, words - 2**32).int()
        return {"planes": signed.contiguous().view(torch.uint8)}


class BitTiles(Value):
    """The tiles of 8 rows and 128 inputs of a left operand that are not zero; others are jumped."""

    begins: Integers  # [L / 8 + 1], where the tiles of each eight rows begin in `numbers`.
    numbers: Integers  # [T], the numbers of these tiles along K, rising.


class BitRounding(Value):
    """How floats become codes of a BitMatrix.

    Signed: rint(x / step), from -Q to Q = 2^(bits - 1) - 1, or from 0 to 1 for 1 bit.
    With `start`: floor((x - start) / step), from 0 to 2^bits - 1. The code of NaN is 0.
    """

    step: Floats  # [1]
    start: Floats | None  # [1]

    def codes(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """Reference: int32 codes of x, any shape."""
        if self.start is not None:
            codes, low, high = ((x - self.start) / self.step).floor(), 0, 2**bits - 1
        else:
            high = max(1, 2 ** (bits - 1) - 1)
            codes, low = (x / self.step).round(), 0 if bits == 1 else -high
        return codes.clamp(low, high).nan_to_num(0.0).int()


class RoundBits(Operation):
    """Rounds a matrix [M, N] to planes."""

    x: In[Floats]  # [M, N]
    rule: In[BitRounding]
    out: Out[BitMatrix]

    rows = extent(0, "x")
    columns = extent(1, "x")

    def reference(self):
        return {"out": self.out.pack(self.rule.codes(self.x, self.out.bits))}


class UnpackBits(Operation):
    """The codes of lines as bytes; unsigned codes of 8 bits wrap around."""

    matrix: In[BitMatrix]
    codes: Out[Codes]  # [P, Q], for up to L lines and 32 * W codes of a line, or zeros.

    lines = extent(0, "codes")
    depth = extent(1, "codes")

    def reference(self):
        codes = self.matrix.codes()[: self.lines, : self.depth]
        below = (0, self.depth - codes.shape[1], 0, self.lines - len(codes))
        return {"codes": torch.nn.functional.pad(codes, below).to(torch.int8)}


class BitProduct(Operation):
    """The product of planes: exact sums, or sums times a factor rounded in the same pass."""

    a: In[BitMatrix]  # Of rows.
    b: In[BitMatrix]  # `by_column`.
    tiles: In[BitTiles] | None  # Of `a` with 1 bit; None: all tiles are multiplied.
    rows: int  # M.
    columns: int  # N.
    popcounts: bool  # Whether the CPU counts the bits of words in vectors (VPOPCNTDQ).
    sums: Out[Integers] | None  # [M, N]
    factor: In[Floats] | None  # [1], of sums before they are rounded.
    rule: In[BitRounding] | None
    out: Out[BitMatrix] | None  # Instead of `sums`.

    def reference(self):
        a, b = self.a.codes()[: self.rows].double(), self.b.codes()[: self.columns].double()
        if self.tiles is not None:
            a = a * self._kept()
        sums = (a @ b.t()).int()
        if self.out is None:
            return {"sums": sums}
        codes = self.rule.codes(sums.float() * self.factor, self.out.bits)
        return {"out": self.out.pack(codes)}

    def _kept(self) -> torch.Tensor:
        """Reference: which codes of `a` [M, 32 * W] lie in a tile that is multiplied."""
        lines, depth = TILE
        counts = self.tiles.begins.diff()
        strips = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        kept = counts.new_zeros(len(counts), self.a.words * WORD // depth)
        kept[strips, self.tiles.numbers] = 1
        return kept.repeat_interleave(lines, 0).repeat_interleave(depth, 1)[: self.rows]


class ByteProduct(Operation):
    """Exact sums of int8 codes: on the CPU by a packed weight, on CUDA by an int8 product."""

    x: In[Codes]  # [M, K]
    weight: In[PackedWeight] | None  # [N, K], on the CPU.
    codes: In[Codes] | None  # [N, K], instead of `weight`: on CUDA.
    sums: Out[Integers]  # [M, N]

    rows = extent(0, "x")

    def reference(self):
        codes = self.weight.codes() if self.codes is None else self.codes
        return {"sums": gemm.reference(self.x, codes)}
