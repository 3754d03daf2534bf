"""The kernel that makes the gradient of a weight in one: exact against the CPU, and what it takes
of a GPU."""

import math
import shutil

import pytest
import torch

from lsq import gemm
from lsq.native.launch import TICKETS, Launch
from lsq.ops.sums import FinishSums
from tests.ops.compare import by_row, empty, on_cpu
from tests.ops.cuda import current_device, run
from tests.ops.test_weight_gradient import case
from tests.ops.tiles import (
    SMALL,
    TARGETS,
    TILES,
    WARPGROUPS,
    assert_nothing_spills,
    assert_two_blocks_fit,
    in_one,
    in_parts,
    largest_tile,
    launches,
    multiplications,
    names,
    traffic,
    with_tiles,
)

KERNEL = "lsq_weight_gradient_product"


def turns():
    """Three steps along K and more, all rows of a tile's quarter, and three blocks for a tile."""
    for tile in (*TILES, *WARPGROUPS):
        compare(272, tile, learned_step=True, columns=144, outputs=139, padded=144)
        compare(272, in_parts(tile, 4), learned_step=True, columns=144, outputs=139, padded=144)


def compare(rows, tile, **given):
    operation = case(rows, **given)
    found = in_one(operation, tile)
    assert torch.equal(found.dweight, on_cpu(operation).dweight)
    return found


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(
    "tile, rows, columns, outputs", with_tiles([(1, 16, 13), (41, 48, 70), (341, 144, 139)])
)
def test_gradients_are_exact(tile, split, rows, columns, outputs):
    compare(
        rows,
        in_parts(tile, split),
        learned_step=True,
        columns=columns,
        outputs=outputs,
        padded=-(-outputs // 16) * 16,
    )


@pytest.mark.parametrize("tile", [SMALL, WARPGROUPS[-1]], ids=str)
def test_a_scale_for_each_row(tile):
    compare(41, tile, columns=144, outputs=70, padded=80, form=by_row)


@pytest.mark.parametrize("split", range(1, 7))
@pytest.mark.parametrize("rows", [7, 130, 300])
def test_more_parts_than_steps_and_fewer(split, rows):
    compare(rows, in_parts(SMALL, split))


@pytest.mark.parametrize("learned_step", [False, True])
@pytest.mark.parametrize("clips", [None, 1])
@pytest.mark.parametrize("split", [1, 2])
def test_every_end(learned_step, clips, split):
    found = compare(
        341,
        in_parts(SMALL, split),
        learned_step=learned_step,
        clips=clips,
        columns=80,
        outputs=93,
        padded=96,
    )
    assert found.dclip.all()


def test_results_that_nobody_wants():
    operation = case(41)
    operation.dclip = None
    in_one(operation, SMALL)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("split", [1, 2])
def test_a_poisoned_row_poisons_the_whole_gradient(value, split):
    operation = case(141)
    operation.gradient.scale[40] = value
    found = in_one(operation, in_parts(SMALL, split))
    assert (
        found.dweight[operation.weight.values.abs() <= operation.weight.clip[:, None]].isnan().all()
    )


def test_a_weight_that_is_nan():
    operation = case(7, learned_step=True)
    operation.weight.values[3, 5] = math.nan
    assert in_one(operation, SMALL).dclip.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("clips", [None, 1])
def test_an_empty_batch(clips):
    """There is nothing to multiply, and the kernel on rows writes zeros."""
    found = in_one(case(0, learned_step=True, clips=clips), SMALL)
    assert not found.dweight.any() and not found.dclip.any()


@pytest.mark.parametrize("clips", [None, 1])
def test_sums_that_are_left_are_finished_alike(clips):
    operation = case(150, columns=144, outputs=70, padded=80, clips=clips)
    with gemm.ended_by(SMALL):
        expected = run(operation)
        (left,) = operation.leave_sums(lambda name, shape, dtype: empty(*shape))
        left.parts = run(operation).parts
    finished = run(FinishSums(sums=[left])).sums[0]
    assert (finished.first if clips is None else finished.clip).equal(expected.dclip)


def test_tickets_are_left_at_zero():
    target = current_device()
    in_one(case(341), in_parts(SMALL, 3))
    assert not target.memory(target.stream(), 0, False).ticket.any()


def test_launches():
    """Both operands, codes of one; the product; the sums for the clips."""
    operation = case(341)
    assert names(launches(operation, SMALL)) == [
        "lsq_begin_weight_gradient",
        "lsq_round_transposed",
        KERNEL,
        "lsq_finish_own_sums",
    ]
    operation.dclip = None
    assert names(launches(operation, in_parts(SMALL, 3)))[2:] == [KERNEL]


def test_parts_of_another_way():
    operation = case(41, clips=1)
    with gemm.ended_by(None):
        operation.leave_sums(lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
    with pytest.raises(
        ValueError, match=r"are \[29, 1\], and products as they are tuned now leave \[4, 1\]"
    ):
        launches(operation, SMALL)


def test_what_the_kernel_does_not_take():
    with pytest.raises(ValueError, match="width of a weight is 40.*multiple of 16"):
        launches(case(7, columns=40), SMALL)
    wide = case(7, columns=64 * 65, outputs=64 * 65, padded=64 * 65)
    with pytest.raises(ValueError, match=f"4160 x 4160 has more than {TICKETS} of them"):
        launches(wide, in_parts(SMALL, 2))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
@pytest.mark.parametrize(
    "tile",
    [
        SMALL,
        in_parts(SMALL, 2),
        WARPGROUPS[1],
        *(pytest.param(one, marks=pytest.mark.thorough) for one in (TILES[0],)),
    ],
    ids=str,
)
def test_no_conflicts_whole_sectors_and_no_more_multiplications_than_needed(tile):
    (entry,) = of_kernel(case(128, columns=128, outputs=128, padded=128), tile)
    found, of = traffic(entry)
    operation, gradient, x, *_, parts, _ = entry.arguments
    assert found.shared_passes == found.shared_least
    assert multiplications(found, tile) == 128**3
    gradient, x = of[id(gradient)].reads, of[id(x)].reads
    assert gradient.bytes == 128**3 // tile.columns and gradient.sectors * 32 == gradient.bytes
    assert x.bytes == 128**3 // tile.rows and x.sectors * 32 == x.bytes
    assert of[id(operation.dweight)].writes.bytes == 4 * 128**2
    if parts is not None:  # the last block of a tile has its own
        written, read = of[id(parts)].writes, of[id(parts)].reads
        assert written.bytes == tile.split * 4 * 128**2 and written.sectors * 32 == written.bytes
        assert read.bytes == (tile.split - 1) * 4 * 128**2 and read.sectors * 32 == read.bytes


def of_kernel(operation, tile) -> list[Launch]:
    return [
        entry
        for entry in launches(operation, tile)
        if isinstance(entry, Launch) and entry.kernel.name == KERNEL
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    for tile in (largest_tile(target), SMALL):
        (entry,) = of_kernel(case(7), tile)
        assert_two_blocks_fit(entry, target)


@pytest.mark.thorough
def test_wgmma_spills_nothing():
    assert_nothing_spills(lambda tile: of_kernel(case(7), tile)[0])
