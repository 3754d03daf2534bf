"""Matrices of codes of 1 to 8 bits, after QGTC (Wang et al., PPoPP 2022, arXiv:2111.09547)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lsq.bits.choice import counts_bits, planned
from lsq.ops.bit_product import (
    TILE,
    BitMatrix,
    BitProduct,
    BitRounding,
    BitTiles,
    ByteProduct,
    RoundBits,
    UnpackBits,
    padded_shape,
)
from lsq.ops.packed_weight import PackedWeight
from lsq.quant import calibrate, check_clip, scale_of
from lsq.quant.stored import Decode, StoredType
from lsq.run import backends

ALONG = ("rows", "columns")
MEASURED = ("absmax", "mse")
LARGEST_SUM = 2**31 - 1
VECTOR = 16  # Values to which matrices of int8 products on CUDA are padded.


def to_bits(
    tensor: Tensor,
    bits: int,
    *,
    clip: float | Tensor | str | None = None,
    along: str = "rows",
    signed: bool = True,
) -> BitTensor:
    """Round a matrix to codes of 1 to 8 bits, stored as planes of bits.

    Signed codes are lsq's: rint(x / s) from -Q to Q, Q = 2^(bits - 1) - 1, s = clip / Q. One bit
    has no sign: it is 1 above half a clip, s = clip. So an adjacency matrix becomes its ones.
    Unsigned codes are QGTC's: floor((x - min) / s), 0 to 2^bits - 1, s = (max - min) / 2^bits.

    Args:
        tensor: [rows, columns] of numbers or truth values, dense or sparse, without a gradient.
        clip: of signed codes: a number, a tensor [1], "absmax" (the default) or "mse", which needs
            2 bits.
        along: the dimension that products sum over, whose codes share words: "rows" for a left
            operand [M, K], "columns" for a right one [K, N].

    Raises:
        ValueError: an argument is not allowed, or a clip is to be measured of NaN or infinity.
    """
    _check_bits(bits)
    _check_along(along)
    if not isinstance(tensor, Tensor) or tensor.dim() != 2 or not tensor.numel():
        shape = list(getattr(tensor, "shape", ()))
        raise ValueError(
            f"a bit tensor is made of a tensor [rows, columns] with elements, not of a"
            f" {type(tensor).__name__} {shape}; give one matrix, reshaped if need be"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "bit tensors have no gradients, but the tensor requires one; give tensor.detach(), or"
            " call to_bits under torch.no_grad()"
        )
    x = tensor.detach().float().to_dense().contiguous()
    if signed:
        step, start = _step_of("absmax" if clip is None else clip, bits, x), None
        scale = torch.where(x.isnan().any(), math.nan, step)
    elif clip is not None:
        raise ValueError(
            f"clip is {clip!r}, but unsigned codes go from the least to the largest value; leave"
            " clip out, or take signed=True"
        )
    else:
        start, most = (one.view(1) for one in torch.aminmax(x))
        step = (most - start) / 2**bits
        scale = step + 0 * step  # NaN unless it is finite
    made = BitTensor._over(tuple(x.shape), bits, along, signed, scale, start)
    rule = BitRounding(step=step, start=start)
    backends.run(RoundBits(x=x, rule=rule, out=made._matrix))
    return made


@dataclass(frozen=True, eq=False)
class BitTensor:
    """A matrix as stacked planes of bits: value = scale * code + offset.

    `a @ b` multiplies the codes of a left operand (along "rows") and a right one (along "columns").
    """

    planes: Tensor
    """uint8, words of 32 codes, the first in the lowest bit. Along rows: [bits, PAD8(M), PAD128(K)
    / 8], along columns [bits, PAD128(K) / 32, 4 * PAD8(N)]. Padding is zero."""
    shape: tuple[int, int]
    along: str
    signed: bool
    scale: Tensor  # [1], NaN if a value was NaN.
    offset: Tensor | None = None  # [1], of unsigned codes: the least value.

    @classmethod
    def _over(cls, shape, bits: int, along: str, signed: bool, scale, offset=None) -> BitTensor:
        """Make one whose planes are still to be written."""
        sizes = padded_shape(*_lines_first(shape, along), bits, along == "columns")
        planes = torch.empty(sizes, dtype=torch.uint8, device=scale.device)
        return cls(planes, shape, along, signed, scale, offset)

    @property
    def bits(self) -> int:
        return len(self.planes)

    @property
    def device(self) -> torch.device:
        return self.planes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the planes. The first product by bytes keeps a right operand as bytes, too."""
        return self.planes.nbytes

    def codes(self) -> Tensor:
        """Return the codes: int8, or uint8 if unsigned."""
        lines = self._bytes()
        codes = lines if self.along == "rows" else lines.t().contiguous()
        return codes if self.signed else codes.view(torch.uint8)

    def to_val(self) -> Tensor:
        """Return the values, float32."""
        values = self.codes().float() * self.scale
        return values if self.offset is None else values + self.offset

    def to(self, device: torch.device | str) -> BitTensor:
        """Return this tensor on a device; itself if it is there."""
        planes = self.planes.to(device)
        if planes is self.planes:
            return self
        offset = None if self.offset is None else self.offset.to(device)
        return replace(self, planes=planes, scale=self.scale.to(device), offset=offset)

    def __matmul__(self, other: BitTensor) -> Tensor:
        """Return the exact sums int32 [M, N] of products of codes (QGTC's bitMM2Int).

        Raises:
            ValueError: the operands lie along other dimensions, on two devices, or have not the
                same K; or sums over K might not fit 32 bits.
        """
        if not isinstance(other, BitTensor):
            raise TypeError(
                f"a BitTensor cannot be multiplied by a {type(other).__name__}; make the other"
                " operand by to_bits, or multiply the values: a.to_val() @ b"
            )
        return self._sums(other, planned(self, other).way)

    def product(
        self, other: BitTensor, *, bits: int, clip: float | Tensor, along: str = "rows"
    ) -> BitTensor:
        """Return the product rounded to signed codes (QGTC's bitMM2Bit): the sums of `@`, times
        both scales, without offsets. Planes are rounded in the pass that multiplies them.

        Args:
            clip: a number, or a tensor [1].
            along: the dimension that the next product sums over.

        Raises:
            ValueError: see `@` and to_bits.
        """
        _check_bits(bits)
        _check_along(along)
        return self._rounded(other, planned(self, other).way, bits, clip, along)

    def check_product(self, other: BitTensor) -> None:
        """Raise ValueError unless self @ other can be made; see there."""
        for name, one, needed in (("left", self, "rows"), ("right", other, "columns")):
            if one.along != needed:
                raise ValueError(
                    f"the {name} operand {list(one.shape)} was packed along {one.along}; pack it"
                    f" along {needed}: to_bits(..., along={needed!r})"
                )
        inner = self.shape[1]
        if inner != other.shape[0]:
            raise ValueError(
                f"the operands are {list(self.shape)} and {list(other.shape)}; columns of the left"
                " one and rows of the right one must be as many"
            )
        if self.device != other.device:
            raise ValueError(
                f"the operands are on {self.device} and {other.device}; move one by .to(device)"
            )
        most = LARGEST_SUM // (self._largest * other._largest)
        if inner > most:
            raise ValueError(
                f"sums over {inner:,} products of {self.bits} and {other.bits} bits might not fit"
                f" 32 bits; at most {most:,} are allowed: multiply parts, or take fewer bits"
            )

    @property
    def tile_count(self) -> int:
        """Tiles of 8 lines and 128 codes."""
        return self._matrix.lines // TILE[0] * (self._matrix.words * 32 // TILE[1])

    @property
    def jumped(self) -> int:
        """Tiles of zeros, which products by planes jump: of a left operand with 1 bit."""
        return 0 if self._tiles is None else self.tile_count - len(self._tiles.numbers)

    @property
    def _largest(self) -> int:
        if not self.signed or self.bits == 1:
            return 2**self.bits - 1
        return 2 ** (self.bits - 1) - 1

    @property
    def _matrix(self) -> BitMatrix:
        return BitMatrix(
            planes=self.planes,
            is_signed=self.signed and self.bits > 1,
            by_column=self.along == "columns",
        )

    @cached_property
    def _tiles(self) -> BitTiles | None:
        if self.bits != 1 or self.along != "rows":
            return None
        strips = self.planes.view(torch.int64).view(-1, TILE[0], self.planes.shape[2] // 16, 2)
        kept = (strips != 0).any(3).any(1)
        begins = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        return BitTiles(begins=begins.int(), numbers=kept.nonzero()[:, 1].int())

    def _bytes(self) -> Tensor:
        """Return the codes of all lines, int8; unsigned ones of 8 bits wrap around."""
        lines = _lines_first(self.shape, self.along)
        codes = self.planes.new_empty(lines, dtype=torch.int8)
        backends.run(UnpackBits(matrix=self._matrix, codes=codes))
        return codes

    @property
    def _excess(self) -> int:
        """What must be taken off codes so that they fit int8."""
        return 128 if self._largest > 127 else 0

    @cached_property
    def _weight(self) -> PackedWeight:
        """A right operand as products by bytes read it on the CPU."""
        zero = 2 ** (self.bits - 1) if self._matrix.is_signed else 0
        stored = (self._bytes() + zero).view(torch.uint8)
        kind = StoredType(bits=self.bits, decode=Decode.AFFINE, zero=zero)
        ones = stored.new_ones(len(stored), dtype=torch.float32)
        return PackedWeight.of_stored(stored, ones, kind)

    @cached_property
    def _line_sums(self) -> Tensor:
        return self.codes().sum(0, dtype=torch.int32)

    def _sums(self, other: BitTensor, way: str) -> Tensor:
        if way == "bytes":
            return self._sums_of_bytes(other)
        sums = self._sums_to_write(other.shape[1])
        backends.run(self._planes_product(other, sums=sums))
        return sums

    def _rounded(self, other: BitTensor, way: str, bits: int, clip, along: str) -> BitTensor:
        factor, step = self.scale * other.scale, _step_of(clip, bits, self.scale, measured=False)
        shape, scale = (self.shape[0], other.shape[1]), step + 0 * factor
        made, rule = BitTensor._over(shape, bits, along, True, scale), BitRounding(step=step)
        if way == "bytes":
            x = self._sums_of_bytes(other).float() * factor
            backends.run(RoundBits(x=x, rule=rule, out=made._matrix))
        else:
            end = {"factor": factor, "rule": rule, "out": made._matrix}
            backends.run(self._planes_product(other, **end))
        return made

    def _planes_product(self, other: BitTensor, **end) -> BitProduct:
        return BitProduct(
            a=self._matrix,
            b=other._matrix,
            tiles=self._tiles,
            rows=self.shape[0],
            columns=other.shape[1],
            popcounts=counts_bits(),
            **end,
        )

    def _sums_of_bytes(self, other: BitTensor) -> Tensor:
        x, columns = self._bytes(), other.shape[1]
        x = x ^ -128 if self._excess else x
        if self.device.type == "cpu":
            sums = self._sums_to_write(columns)
            backends.run(ByteProduct(x=x, weight=other._weight, sums=sums))
        else:
            y = other._bytes()
            y = y ^ -128 if other._excess else y
            sums = self._sums_to_write(columns + -columns % VECTOR)
            backends.run(ByteProduct(x=padded(x, 0), codes=padded(y, VECTOR), sums=sums))
            sums = sums[:, :columns].contiguous()
            if other._excess:
                sums += other._excess * x.sum(1, keepdim=True, dtype=torch.int32)
        if self._excess:
            sums += self._excess * other._line_sums
        return sums

    def _sums_to_write(self, columns: int) -> Tensor:
        return self.planes.new_empty((self.shape[0], columns), dtype=torch.int32)


def padded(codes: Tensor, lines: int) -> Tensor:
    """Pad codes [L, K] with zeros: K to a multiple of VECTOR, L to one of `lines`, unless 0."""
    below = -len(codes) % lines if lines else 0
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % VECTOR, 0, below))


def _lines_first(shape: tuple[int, int], along: str) -> tuple[int, int]:
    return shape if along == "rows" else shape[::-1]


def _check_bits(bits: int) -> None:
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; it must be a whole number from 1 to 8")


def _check_along(along: str) -> None:
    if along not in ALONG:
        raise ValueError(
            f'along is {along!r}; give "rows" for a left operand, "columns" for a right one'
        )


def _step_of(clip: float | Tensor | str, bits: int, x: Tensor, *, measured: bool = True) -> Tensor:
    """Return what a signed code is worth, float32 [1] on the device of x."""
    if measured and clip in MEASURED[: 1 if bits == 1 else 2]:
        found = calibrate(x, clip, max(2, bits))
    elif isinstance(clip, int | float) and not isinstance(clip, bool):
        found = torch.full((1,), clip, dtype=torch.float32, device=x.device)
    elif isinstance(clip, Tensor) and clip.shape == (1,) and clip.device == x.device:
        found = clip.detach().float()
    else:
        names = ', "absmax", or with 2 bits and more "mse"' if measured else ""
        raise ValueError(
            f"clip is {clip!r}; give a number above 0, a tensor [1] on {x.device}{names}"
        )
    check_clip(found, "clip")
    return found if bits == 1 else scale_of(found, bits)
