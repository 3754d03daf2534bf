"""Weights that are packed once, as products on the CPU read them. P outputs, K inputs.

Four forms share one description: int8 tiles, 2:4 sparse tiles, tiles of Int4, and fields of codes
of 1 to 8 bits of any number format (lsq/quant/stored.py). Fields have a scale for each output, or
for each group of inputs of an output.
"""

from __future__ import annotations

import torch

from lsq.gemm.registers import BY_RULE, kind_of, most_rows
from lsq.native import loader, tiles
from lsq.native.launch import check
from lsq.ops.grouped_product import STEP, GroupedCodes
from lsq.program.declare import Bytes, Floats, Value
from lsq.quant import layouts
from lsq.quant.stored import Decode, StoredType, field_bits, field_bytes, unpack

SIDE = 16  # Outputs of a tile.
HALVES, WORDS, UNITS = 4, 64, 8
"""In a sparse block: halves of tiles; in each half, bytes of positions and units of four inputs."""
INT4_BLOCK = 1088  # Bytes of two tiles of 4-bit codes with their multipliers.


class PackedWeight(Value):
    """Codes [P, K] in memory that begins at a multiple of ALIGNMENT, and their scales."""

    tiles: Bytes  # Behind the fields of groups lie the groups' scales.
    scale: Floats | None  # [P]; None: fields of groups.
    table: Bytes | None  # StoredType.table_bytes of fields.
    columns: int  # P.
    inner: int  # K.
    sparse: bool = False  # Whether tiles hold only two of four inputs.
    bits: int = 8  # Width of a code; 4 without `step`: groups of Int4 (csrc/cpu/int4_tiles.h).
    step: int = 0  # Of fields: StoredType.step; 0: codes are no fields.
    zero: int = 0  # StoredType.zero
    words: bool = False  # Whether the table has 16-bit numbers.
    group: int = 0  # Inputs of an output that share a scale; 0: all of them.
    scales: int = 0  # Scales of groups of an output; 1: all groups have the same.
    registers: int = -1  # Rows up to which fields stay in registers; -1: by the rule.
    instructions: int = 0  # Number of the instructions that multiply (lsq/native/tiles.py).

    @classmethod
    def of(
        cls, codes: torch.Tensor, scale: torch.Tensor, instructions: str | None = None
    ) -> PackedWeight:
        """Pack codes int8 [P, K] with scale float32 [P], for the fastest or the named instructions.

        Raises:
            ValueError: the processor has no such instructions, or the C++ library is missing.
        """
        chosen = _chosen(instructions)
        memory = _aligned(tiles.packed_bytes(*codes.shape))
        loader.call("lsq_pack_columns", tiles.TileProduct.of(codes[:1], codes, chosen, memory))
        return cls._of(memory, scale, codes.shape[1], chosen)

    @classmethod
    def of_sparse(
        cls, codes: torch.Tensor, scale: torch.Tensor, instructions: str | None = None
    ) -> PackedWeight:
        """Pack codes with at most two nonzero codes in four neighbouring inputs; see `of`.

        Raises:
            ValueError: the codes are not 2:4 sparse.
        """
        chosen = _chosen(instructions)
        memory = _aligned(tiles.packed_sparse_bytes(*codes.shape))
        fits = torch.zeros(1, dtype=torch.int64, device="cpu")
        product = tiles.TileProduct.of(codes[:1], codes, chosen, memory)
        loader.call("lsq_pack_sparse", product, fits)
        if not fits:
            raise ValueError(
                f"the codes {list(codes.shape)} are not 2:4 sparse: multiply them by a mask of"
                " lsq.models.sparsity.choose, or pack them with PackedWeight.of"
            )
        return cls._of(memory, scale, codes.shape[1], chosen, sparse=True)

    @classmethod
    def of_int4(
        cls, stored: torch.Tensor, scale: torch.Tensor, inner: int, instructions: str | None = None
    ) -> PackedWeight:
        """Pack int8 [P, stored columns], the rows of Int4 with K = `inner` inputs; see `of`."""
        chosen, columns = _chosen(instructions), len(stored)
        blocks = _int4_shape(columns, inner)
        memory = _aligned(blocks.numel() + 4 * tiles.PAIR * blocks[0])  # with a sum for each column
        loader.call("lsq_pack_int4", stored.contiguous(), columns, inner, memory)
        return cls._of(memory, scale, inner, chosen, bits=4)

    @classmethod
    def of_stored(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        stored: StoredType,
        *,
        group: int = 0,
        instructions: str | None = None,
    ) -> PackedWeight:
        """Pack stored codes uint8 [P, K] of a number format to fields.

        Args:
            scale: float32 [P]; with `group`, [P, groups] or [P, 1].
            group: inputs that share a scale, a multiple of 16.

        Raises:
            ValueError: see `of`; or a dtype, a shape or the group is another, the format has no
                integer product (StoredType.whole), or sums of so many do not fit 32 bits.
        """
        groups = -(-codes.shape[1] // group) if group > 0 else 0
        shapes = [(len(codes), groups), (len(codes), 1)] if groups else [(len(codes),)]
        check(
            codes.dtype == torch.uint8 and group >= 0 and group % STEP == 0,
            f"codes are {codes.dtype} in groups of {group}; give uint8 codes in groups of a"
            f" multiple of {STEP}, or 0 for all inputs",
        )
        check(
            tuple(scale.shape) in shapes,
            f"the scales have the shape {list(scale.shape)}; it must be one of {shapes}",
        )
        scales = scale.shape[1] if group else 0
        size = field_bytes(codes.shape, stored, group, scales)
        packed = cls.over(_aligned(size), codes.shape, stored, group, scales, instructions)
        packed.fill(codes, scale, stored.unit)
        return packed

    @classmethod
    def over(
        cls,
        memory: torch.Tensor,
        shape: tuple[int, int],
        stored: StoredType,
        group: int,
        scales: int,
        instructions: str | None = None,
    ) -> PackedWeight:
        """Describe a weight [P, K] of fields in aligned memory uint8 [field_bytes]."""
        chosen, bits = _chosen(instructions), field_bits(shape[1], stored, group)
        return cls(
            tiles=memory,
            table=stored.table_bytes,
            columns=shape[0],
            inner=shape[1],
            bits=bits,
            step=stored.step,
            zero=stored.zero,
            words=stored.decode is Decode.WORDS,
            group=group,
            scales=scales,
            registers=BY_RULE if group else most_rows(kind_of(bits, stored.decode.value), chosen),
            instructions=tiles.INSTRUCTIONS[chosen],
        )

    def fill(self, codes: torch.Tensor, scale: torch.Tensor, unit: float) -> None:
        """Write fields of stored codes uint8 [P, K], and their scales times `unit`."""
        scale = scale * unit
        if not self.group:
            self.scale = scale
        given = GroupedCodes(
            codes=codes.contiguous().view(torch.int8),
            scale=scale.view(len(codes), max(1, self.scales)),
            group=self.group,
        )
        if codes.numel():
            loader.call("lsq_pack_fields", given, self)

    @classmethod
    def _of(cls, memory, scale, inner: int, chosen: str, **form) -> PackedWeight:
        number = tiles.INSTRUCTIONS[chosen]
        return cls(
            tiles=memory,
            scale=scale,
            columns=len(scale),
            inner=inner,
            instructions=number,
            **form,
        )

    def values(self) -> torch.Tensor:
        """Reference: the values float32 [P, K] of fields with scales of groups."""
        padded = -(-self.columns // tiles.PAIR) * tiles.PAIR
        scale = self.tiles[len(self.tiles) - 4 * self.scales * padded :]
        scale = scale.view(torch.float32).view(-1, self.scales, SIDE).transpose(1, 2)
        scale = scale.reshape(-1, self.scales)[: self.columns]
        return GroupedCodes(codes=self.codes(), scale=scale, group=self.group).decode()

    def codes(self) -> torch.Tensor:
        """Reference: the whole numbers that products multiply, [P, K]."""
        if self.step:
            packed = self.tiles[: layouts.CPU.packed_bytes(self.bits, self.columns, self.inner)]
            codes = unpack(layouts.CPU, packed, self.bits, (self.columns, self.inner))
            return self._whole(codes)
        if self.bits == 4:
            return self._int4_codes()
        columns = -(-self.columns // tiles.PAIR) * tiles.PAIR
        inner = -(-self.inner // tiles.INNER) * tiles.INNER
        dense = self.tiles[: columns * inner].view(torch.int8)
        whole = self._sparse_tiles() if self.sparse else dense
        whole = whole.view(columns // SIDE, -1, SIDE, SIDE, 4)
        return whole.permute(0, 3, 1, 2, 4).reshape(columns, inner)[: self.columns, : self.inner]

    def _whole(self, codes: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            return codes.int() * self.step - self.zero
        low, high = self.table.int().view(2, -1)
        return (low + 256 * high)[codes.int()] - self.zero

    def _sparse_tiles(self) -> torch.Tensor:
        """Return the dense tiles of csrc/cpu/tiles.h, int8."""
        pairs, depth = -(-self.columns // tiles.PAIR), -(-self.inner // tiles.INNER)
        halves = self.tiles[: pairs * depth * tiles.SPARSE_BLOCK]
        halves = halves.view(-1, tiles.SPARSE_BLOCK // HALVES)
        words = halves[:, :WORDS].contiguous().view(torch.int32)
        values = halves[:, WORDS:].view(torch.int8)
        shifts = torch.arange(4 * UNITS, device="cpu").view(UNITS, 1, 4)
        kept = (words.long()[:, None, :, None] >> shifts & 1).bool()  # half, unit, column, input
        found = torch.zeros_like(kept, dtype=torch.int8)
        in_order = values.reshape(-1, UNITS // 2, SIDE, 2, 2).transpose(2, 3).reshape(-1)
        found[kept] = in_order
        return found.view(pairs, depth, 2, -1).transpose(1, 2).reshape(-1)

    def _int4_codes(self) -> torch.Tensor:
        shape = _int4_shape(self.columns, self.inner)
        blocks = self.tiles[: shape.numel()].view(shape)
        width = SIDE * tiles.INNER
        pairs, multipliers = blocks.split([width, INT4_BLOCK - width], dim=2)
        halves = torch.stack([pairs & 15, pairs >> 4], dim=3).view(torch.int8)
        # pairs of columns, depth, tile, unit, column, element of it, group -> columns, inputs
        codes = halves.view(*blocks.shape[:2], 2, 8, SIDE, 4, 2).permute(0, 2, 4, 1, 6, 3, 5)
        factors = multipliers.view(torch.int8).reshape(*blocks.shape[:2], 2, SIDE, 2)
        factors = factors.permute(0, 2, 3, 1, 4)[..., None, None].contiguous()
        signed = torch.where(factors < 0, 7 - codes, codes - 8)
        whole = (signed * factors).reshape(len(blocks) * tiles.PAIR, -1)
        return whole[: self.columns, : self.inner]


def _int4_shape(columns: int, inner: int) -> torch.Size:
    """Return [pairs of columns, depth, bytes of a block]."""
    return torch.Size((-(-columns // tiles.PAIR), -(-inner // tiles.INNER), INT4_BLOCK))


def _chosen(instructions: str | None) -> str:
    if not tiles.usable():
        raise ValueError("packed weights need the C++ host library; install g++ and reinstall lsq")
    chosen = instructions or tiles.usable()[0]
    if chosen not in tiles.usable():
        raise ValueError(
            f"{chosen!r} cannot run here; there are {', '.join(map(repr, tiles.usable()))}"
        )
    return chosen


def _aligned(count: int) -> torch.Tensor:
    """Return memory uint8 [count] that begins at a multiple of tiles.ALIGNMENT."""
    memory = torch.empty(count + tiles.ALIGNMENT, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % tiles.ALIGNMENT :][:count]
