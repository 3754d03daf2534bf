"""Layout of gradients in messages between processes: codes of 8 or 4 bits, a scale for each block.

A bucket of v values is cut into S shards of L values each; what lies beyond v counts as zero. Each
shard is one message of M bytes: codes (8 bits: int8; 4 bits: value 2i in the low half of byte i, 2i
+ 1 in the high one, two's complement), bfloat16 scales [B], zeros up to a multiple of 16 bytes.
Blocks start anew in each shard, and the last may be short.
"""

from dataclasses import dataclass

import torch

from lsq.quant import GRADIENT, maximum_code

SHARD_MULTIPLE = 32
"""Values to whose multiples the length of a shard is rounded up: the smallest block, and aligned in
every dtype."""
BLOCKS = (32, 64, 128, 256, 512, 1024)
BITS = (8, 4)
_MESSAGE_MULTIPLE = 16
_SCALE_BYTES = torch.bfloat16.itemsize


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """The messages [S, M] of a bucket.

    Raises:
        ValueError: a field is not what its docstring says, or the shards do not hold the values.
    """

    values: int  # v, at least 1.
    shards: int = 1  # S, at least 1.
    length: int  # L: values of a shard, a multiple of SHARD_MULTIPLE; S * L is at least v.
    block: int = 128  # Values that share a scale, one of BLOCKS.
    bits: int = GRADIENT.bits  # Width of a code, 8 or 4.

    def __post_init__(self):
        for name in ("values", "shards", "length"):
            number = getattr(self, name)
            if not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"{name} of a message layout is {number!r}; it must be a whole number above 0"
                )
        if self.length % SHARD_MULTIPLE:
            raise ValueError(
                f"the length of a shard is {self.length}; it must be a multiple of"
                f" {SHARD_MULTIPLE}: let MessageLayout.for_values choose it"
            )
        if self.block not in BLOCKS:
            raise ValueError(
                f"block is {self.block!r}; it must be one of {', '.join(map(str, BLOCKS))}"
            )
        if self.bits not in BITS:
            raise ValueError(f"bits of a gradient's codes are {self.bits!r}; they must be 8 or 4")
        if self.shards * self.length < self.values:
            raise ValueError(
                f"{self.shards} shards of {self.length} do not hold {self.values} values; choose a"
                f" length of at least {-(-self.values // self.shards)}"
            )

    @classmethod
    def for_values(
        cls, values: int, shards: int, *, block: int = 128, bits: int = GRADIENT.bits
    ) -> "MessageLayout":
        """The layout with the shortest shards that hold `values` values."""
        needed = -(-values // max(1, shards))
        length = -(-needed // SHARD_MULTIPLE) * SHARD_MULTIPLE
        return cls(values=values, shards=shards, length=length, block=block, bits=bits)

    @classmethod
    def of_shard(
        cls, length: int, *, block: int = 128, bits: int = GRADIENT.bits
    ) -> "MessageLayout":
        """The layout of one message by itself."""
        return cls(values=length, length=length, block=block, bits=bits)

    @property
    def largest_code(self) -> int:
        """Q."""
        return maximum_code(self.bits)

    @property
    def blocks(self) -> int:
        """B: blocks of a shard."""
        return -(-self.length // self.block)

    @property
    def code_bytes(self) -> int:
        """Bytes of a message before its scales."""
        return self.length * self.bits // 8

    @property
    def message_bytes(self) -> int:
        """M, a multiple of 16."""
        used = self.code_bytes + _SCALE_BYTES * self.blocks
        return -(-used // _MESSAGE_MULTIPLE) * _MESSAGE_MULTIPLE

    def codes(self, messages: torch.Tensor) -> torch.Tensor:
        """The bytes that hold the codes of messages uint8 [..., M]: a view, int8 [..., L * bits /
        8]."""
        return messages[..., : self.code_bytes].view(torch.int8)

    def scales(self, messages: torch.Tensor) -> torch.Tensor:
        """The scales of messages uint8 [..., M]: a view, bfloat16 [..., B]; NaN where a value was
        not finite."""
        return messages[..., self.code_bytes : self.code_bytes + _SCALE_BYTES * self.blocks].view(
            torch.bfloat16
        )
