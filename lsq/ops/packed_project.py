"""A product with a packed weight and its epilogue, without a backward pass: decoding on the CPU.

    y = x weight^T + bias;   result = activation(y), as floats or rounded once to codes

All threads share the outputs, so that one row keeps them busy. M rows, K inputs, P outputs.
"""

from __future__ import annotations

import torch

from lsq import gemm
from lsq.native import loader, tiles
from lsq.ops.nonlinearity import Activation, Nonlinearity, epilogue
from lsq.program.declare import Bytes, Floats, In, Out, Value, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded

SIDE = 16  # Outputs of a tile.
ALIGNMENT = 64  # Alignment of tiles, in bytes.
HALVES, WORDS, UNITS = 4, 64, 8
"""In a sparse block: halves of tiles; in each half, bytes of positions and units of four inputs."""
INT4_BLOCK = 1088  # Bytes of two tiles of 4-bit codes with their multipliers.


class PackedWeight(Value):
    """Codes [P, K] as tiles, and their scales."""

    tiles: Bytes  # tiles.packed_bytes(P, K) bytes, fewer if sparse or int4; aligned to 64 bytes.
    scale: Floats  # [P]
    inner: int  # K.
    sparse: bool  # Whether tiles hold only two of four inputs.
    bits: int  # 8; or 4: groups of Int4 (csrc/cpu/int4_tiles.h).
    instructions: int  # Number of the instructions that multiply (lsq/native/tiles.py).

    columns = extent(0, "scale")  # P.

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
    def _of(cls, memory, scale, inner: int, chosen: str, *, sparse=False, bits=8) -> PackedWeight:
        number = tiles.INSTRUCTIONS[chosen]
        return cls(
            tiles=memory, scale=scale, inner=inner, sparse=sparse, bits=bits, instructions=number
        )

    def codes(self) -> torch.Tensor:
        """Reference: int8 [P, K]."""
        if self.bits == 4:
            return self._int4_codes()
        columns = -(-self.columns // tiles.PAIR) * tiles.PAIR
        inner = -(-self.inner // tiles.INNER) * tiles.INNER
        dense = self.tiles[: columns * inner].view(torch.int8)
        whole = self._sparse_tiles() if self.sparse else dense
        whole = whole.view(columns // SIDE, -1, SIDE, SIDE, 4)
        return whole.permute(0, 3, 1, 2, 4).reshape(columns, inner)[: self.columns, : self.inner]

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
    """Return memory uint8 [count] that begins at a multiple of ALIGNMENT."""
    memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % ALIGNMENT :][:count]


class PackedProject(Operation):
    """The product activation(x weight^T + bias) [M, P] of codes."""

    x: In[Coded]  # [M, K]
    weight: In[PackedWeight]  # [P, K]
    bias: In[Floats] | None  # [P]
    activation: Activation = Activation.none
    out: Out[Floats] | None  # [M, P]
    rounded: Out[Coded] | None  # [M, P], without `clipped` and `error`.

    rows = extent(0, "x.codes")

    def reference(self):
        sums = gemm.reference(self.x.codes, self.weight.codes()).float()
        y = sums * (self.x.scale_of_codes * self.weight.scale)
        y = y if self.bias is None else y + self.bias
        return epilogue(y, Nonlinearity(activation=self.activation), self.rounded)
