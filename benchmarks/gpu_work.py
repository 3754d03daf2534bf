"""What a launch on large tensors does, from what was counted of its like on small ones."""

from dataclasses import dataclass

import torch

from lsq.emulator import profile
from lsq.emulator.profile import Profile, Traffic
from lsq.native.launch import Launch

SECTOR = 32
SPARSE = 0.5
"""Of a tensor that does not grow with the batch; where less of it is touched, more is touched in a
larger batch."""


def bytes_of(tensor: torch.Tensor) -> int:
    """Its size."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: torch.Tensor) -> tuple:
    """Equal for the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a launch does: bytes by the place of their tensor, each counted once, and work by warps.

    A tensor that grows with the batch is read and written as often as at few tokens; one that does
    not, is read by as many more warps as there is more work, and once from memory. One that grows
    more than the work is touched in part.
    """

    reads: dict[object, float]
    writes: dict[object, float]
    sectors: float
    """Of all requests."""
    shared_passes: float
    instructions: dict[str, float]
    warps: int
    warps_of_block: int

    @staticmethod
    def of(counted: Profile, entry: Launch, shared: float = 1.0) -> "Work":
        """Of a launch on large tensors whose like was counted on small ones; `shared` launches
        share its work."""
        tensors = profile.operands_of(entry)
        work = growth(counted, tensors) / shared
        reads: dict[object, float] = {}
        writes: dict[object, float] = {}
        sectors = 0.0
        for real, one in zip(tensors, counted.operands, strict=True):
            own = min(bytes_of(real) / one.bytes, work) if one.bytes else 0.0
            for traffic, moved in ((one.reads, reads), (one.writes, writes), (one.atomics, writes)):
                touched = scaled_bytes(traffic, one.bytes, bytes_of(real), work)
                if touched:
                    moved[place_of(real)] = moved.get(place_of(real), 0.0) + touched
                sectors += traffic.sectors * (own if own > 1 else work)
        block = entry.block[0] * entry.block[1] * entry.block[2]
        return Work(
            reads=reads,
            writes=writes,
            sectors=sectors,
            shared_passes=counted.shared_passes * work,
            instructions={kind: number * work for kind, number in counted.instructions.items()},
            warps=-(-block // profile.WARP) * entry.grid[0] * entry.grid[1] * entry.grid[2],
            warps_of_block=-(-block // profile.WARP),
        )


def growth(counted: Profile, tensors: list[torch.Tensor]) -> float:
    """How much larger these tensors are, by that which has grown most of those that are touched."""
    pairs = zip(tensors, counted.operands, strict=True)
    grown = (
        bytes_of(real) / one.bytes for real, one in pairs if one.reads.touched + one.writes.touched
    )
    return max(grown, default=1.0)


def scaled_bytes(traffic: Traffic, counted: int, real: int, work: float) -> float:
    """Bytes of a tensor of `real` bytes that are touched, where one of `counted` bytes was touched
    so."""
    touched = traffic.touched * SECTOR
    if not touched:
        return 0.0
    grows = min(real / counted, work)
    if grows <= 1 and touched < SPARSE * counted:
        grows = work
    return min(touched * grows, real)
