"""Products that kernels of a GPU end themselves, for the tests of their operations."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from lsq import gemm
from lsq.emulator import profile
from lsq.emulator.profile import Limits, Operand, fitting_blocks
from lsq.gemm.configuration import WGMMA_SM, TileConfiguration
from lsq.native import compiler
from lsq.native.launch import Launch
from lsq.ops import launches as of_operations
from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from tests.ops import cuda
from tests.ops.cuda import compare_cuda
from tests.sampling import first

TILES = [
    TileConfiguration(rows=rows, columns=columns, stages=stages)
    for rows, columns, stages in (
        (128, 128, 4),
        (128, 128, 3),
        (128, 64, 4),
        (64, 128, 3),
        (64, 64, 2),
    )
]
SMALL = TileConfiguration(rows=64, columns=64, stages=3)
WARPGROUPS = [
    TileConfiguration(rows=rows, columns=columns, stages=stages, instruction="wgmma")
    for rows, columns, stages in (
        (128, 128, 5),
        (128, 128, 4),
        (64, 256, 3),
        (128, 64, 5),
        (64, 64, 3),
    )
]
TURNED = (TILES[1], TILES[4], WARPGROUPS[0], WARPGROUPS[4])
"""By both instructions: large tiles and the smallest, many stages and few."""
TARGETS = first(("sm_89", "sm_90a", "sm_80", "sm_86", "sm_100", "sm_120"), 0, 2)
"""Those with least shared memory and with most in the thorough tests."""


def with_tiles(sizes: Sequence[tuple[int, ...]]) -> list:
    """Parameters (tile, *size): each tile with a size in turn, those of TURNED in the usual tests
    and others in the thorough ones; the rest in the slow tests."""
    others = [tile for tile in (*TILES, *WARPGROUPS) if tile not in TURNED]
    found = []
    for tiles, usual in ((TURNED, ()), (others, pytest.mark.thorough)):
        for (turn, tile), (number, size) in itertools.product(enumerate(tiles), enumerate(sizes)):
            marks = usual if turn % len(sizes) == number else pytest.mark.slow
            found.append(pytest.param(tile, *size, id=f"{tile}-{size}", marks=marks))
    return found


def in_parts(tile: TileConfiguration, split: int) -> TileConfiguration:
    """The same with so many blocks for each tile."""
    return dataclasses.replace(tile, split=split)


def here(tile: TileConfiguration | None) -> TileConfiguration | None:
    """It, or the smallest by mma.sync on a GPU without wgmma."""
    if tile is None or tile.instruction == "mma" or cuda.place == "emulator":
        return tile
    hopper = torch.cuda.get_device_capability() == divmod(WGMMA_SM, 10)
    return tile if hopper else in_parts(SMALL, tile.split)


def few_blocks():
    """Two blocks that stay (wgmma) and make several tiles each, on a GPU, too."""
    return mock.patch.object(of_operations, "multiprocessors", lambda: 2)


def in_one(
    operation: Operation,
    tile: TileConfiguration | None,
    dtype: torch.dtype = torch.float32,
    exact: bool = True,
) -> Operation:
    """`compare_cuda` of an operation whose product and end are one launch; of two for None."""
    with few_blocks(), gemm.ended_by(here(tile)):
        return compare_cuda(operation, dtype, exact)


def compare_ways(
    operation: Operation, dtype: torch.dtype = torch.float32, exact: bool = False
) -> Operation:
    """`compare_cuda` by one launch for product and epilogue, then by two; what the two made."""
    in_one(operation, SMALL, dtype, exact)
    return in_one(operation, None, dtype, exact)


WAYS = {"Project", "ProjectInputGradient", "ProjectWeightGradient"}
"""Operations whose products one kernel ends, or another one after it."""


def launches(operation: Operation, tile: TileConfiguration | None) -> list:
    """What an operation launches by a tile, or by cuBLASLt, with memory for what it writes."""
    with gemm.ended_by(tile):
        bound = operation.bind(
            lambda one: (
                torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, VirtualTensor) else one
            )
        )
        return bound.cuda(
            *(torch.zeros(shape, dtype=dtype) for shape, dtype in bound.cuda_scratch())
        )


def names(entries: list) -> list[str]:
    """Of the kernels of a list."""
    return [entry.kernel.name if isinstance(entry, Launch) else "product" for entry in entries]


def traffic(entry: Launch) -> tuple[profile.Profile, dict[int, Operand]]:
    """What the emulator counts of a launch, and of each of its operands by the tensor's id."""
    (found,) = profile.profile([entry])
    return found, dict(zip(map(id, profile.operands_of(entry)), found.operands, strict=True))


def assert_nothing_spills(entry: Launch, target: str):
    """Of the kernel of a launch, compiled by NVRTC; what it takes."""
    kernel = entry.kernel
    compiled = compiler.compile_kernels(kernel.source, kernel.defines, target)
    (taken,) = compiled.resources.values()
    assert not taken.spill_bytes, kernel
    return taken


def assert_two_blocks_fit(entry: Launch, target: str) -> None:
    """A multiprocessor holds two blocks of the kernel, and nothing spills."""
    kilobytes = {"sm_80": 164, "sm_90a": 228, "sm_100": 228}.get(target, 100)
    limits = Limits(warps=48 if kilobytes == 100 else 64, blocks=16, shared=1024 * kilobytes)
    taken, threads = assert_nothing_spills(entry, target), math.prod(entry.block)
    shared = entry.shared + taken.shared_bytes
    assert fitting_blocks(threads, taken.registers, shared, limits) >= 2


def multiplications(found: profile.Profile, tile: TileConfiguration) -> int:
    """Of two numbers, that tensor cores have done."""
    if tile.instruction == "wgmma":
        return found.instructions["wgmma"] * 16 * 32 * tile.columns
    return found.instructions["mma"] * 16 * 32 * 8


def largest_tile(target: str) -> TileConfiguration:
    """The one of 128 x 128 of which a multiprocessor has shared memory for two."""
    return TILES[0] if target in ("sm_80", "sm_90a", "sm_100") else TILES[1]


def assert_whole_sectors(moved, count: int) -> None:
    """So many bytes, in sectors of 32 that are moved whole."""
    assert moved.bytes == count == moved.sectors * 32
