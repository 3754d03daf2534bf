"""Layout of gradients in messages between processes: int8 codes, a scale for each block.

A bucket of v values is cut into S shards of L values each; what lies beyond v counts as zero. Each
shard is one message of M bytes: codes, bfloat16 scales [B], zeros up to a multiple of 16 bytes.
Blocks start anew in each shard, and the last may be short.
"""

from dataclasses import dataclass

import torch

SHARD_MULTIPLE = 32
"""Values to whose multiples the length of a shard is rounded up: the smallest block, and aligned in
every dtype."""
BLOCKS = (32, 64, 128, 256, 512, 1024)
_MESSAGE_MULTIPLE = 16
_SCALE_BYTES = torch.bfloat16.itemsize


@dataclass(frozen=True, kw_only=True)
class MessageLayout:
    """The messages [S, M] of a bucket.

    Raises:
        ValueError: a field is not what its docstring says, or the shards do not hold the values.
    """

    values: int
    """v, at least 1."""
    shards: int = 1
    """S, at least 1."""
    length: int
    """L: values of a shard, a multiple of SHARD_MULTIPLE; S * L is at least v."""
    block: int = 128
    """Values that share a scale, one of BLOCKS."""

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
                f" {SHARD_MULTIPLE}: let "
                "MessageLayout.for_values choose it"
            )
        if self.block not in BLOCKS:
            raise ValueError(
                f"block is {self.block!r}; it must be one of {', '.join(map(str, BLOCKS))}"
            )
        if self.shards * self.length < self.values:
            raise ValueError(
                f"{self.shards} shards of {self.length} do not hold {self.values} values; choose a"
                " length of at least "
                f"{-(-self.values // self.shards)}"
            )

    @classmethod
    def for_values(cls, values: int, shards: int, *, block: int = 128) -> "MessageLayout":
        """The layout with the shortest shards that hold `values` values."""
        needed = -(-values // max(1, shards))
        length = -(-needed // SHARD_MULTIPLE) * SHARD_MULTIPLE
        return cls(values=values, shards=shards, length=length, block=block)

    @classmethod
    def of_shard(cls, length: int, *, block: int = 128) -> "MessageLayout":
        """The layout of one message by itself."""
        return cls(values=length, length=length, block=block)

    @property
    def blocks(self) -> int:
        """B: blocks of a shard."""
        return -(-self.length // self.block)

    @property
    def message_bytes(self) -> int:
        """M, a multiple of 16."""
        used = self.length + _SCALE_BYTES * self.blocks
        return -(-used // _MESSAGE_MULTIPLE) * _MESSAGE_MULTIPLE

    def codes(self, messages: torch.Tensor) -> torch.Tensor:
        """The codes of messages uint8 [..., M]: a view, int8 [..., L]."""
        return messages[..., : self.length].view(torch.int8)

    def scales(self, messages: torch.Tensor) -> torch.Tensor:
        """The scales of messages uint8 [..., M]: a view, bfloat16 [..., B]; NaN where a value was
        not finite."""
        return messages[..., self.length : self.length + _SCALE_BYTES * self.blocks].view(
            torch.bfloat16
        )
