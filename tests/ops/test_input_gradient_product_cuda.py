"""The kernel that makes the gradient of an input in one: exact against the CPU, and what it takes
of a GPU."""

import math
import shutil

import pytest
import torch

from lsq import gemm
from lsq.native.launch import Launch
from lsq.ops.input_gradient_cuda import input_gradient_product
from lsq.ops.nonlinearity import Activation
from lsq.ops.sums import FinishSums
from tests.ops.compare import empty, on_cpu
from tests.ops.cuda import DTYPES, in_dtype, run
from tests.ops.test_input_gradient import case
from tests.ops.test_input_gradient_cuda import ENDS
from tests.ops.tiles import (
    SMALL,
    TARGETS,
    TILES,
    WARPGROUPS,
    assert_nothing_spills,
    assert_two_blocks_fit,
    in_one,
    largest_tile,
    launches,
    multiplications,
    names,
    traffic,
    with_tiles,
)

KERNEL = "lsq_input_gradient_product"


def turns():
    """Three steps along K and more, and all rows of a tile's quarter."""
    for tile in (*TILES, *WARPGROUPS):
        compare(
            150, tile, kind=Activation.relu, dropout=0.1, learned_step=True, columns=144, padded=272
        )


def compare(rows, tile, **given):
    operation, _ = case(rows, **given)
    found = in_one(operation, tile)
    assert torch.equal(found.dx, on_cpu(operation).dx)
    return found


@pytest.mark.parametrize(
    "tile, rows, columns, padded", with_tiles([(1, 16, 16), (41, 80, 48), (130, 144, 336)])
)
def test_gradients_are_exact(tile, rows, columns, padded):
    found = compare(rows, tile, kind=Activation.relu, added=True, columns=columns, padded=padded)
    assert rows == 1 or (found.sum.any() and found.dclip.any())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_end(end, dtype):
    operation, _ = case(41, **end)
    in_one(operation, SMALL, dtype)


def test_results_that_nobody_wants():
    compare(41, SMALL, rest=False)


@pytest.mark.parametrize("row", [0, 69])
def test_a_row_that_is_not_finite_stays_alone(row):
    operation, _ = case(70, kind=Activation.relu, dropout=0.2)
    operation.gradient.scale[row] = math.nan
    assert in_one(operation, SMALL).dx.isnan().any(1).nonzero().tolist() == [[row]]


def test_sums_that_are_left_are_finished_alike():
    operation, _ = case(150, columns=144)
    with gemm.ended_by(SMALL):
        expected = run(operation)
        (left,) = operation.leave_sums(lambda name, shape, dtype: empty(*shape))
        left.parts = run(operation).parts
    finished = run(FinishSums(sums=[left])).sums[0]
    assert finished.first.equal(expected.sum) and finished.clip.equal(expected.dclip)


def test_launches():
    """A weight that does not come transposed, the product, the sums; codes of rows have a product
    by itself."""
    operation, _ = case(41)
    assert names(launches(operation, SMALL)) == [
        "lsq_transpose_codes",
        KERNEL,
        "lsq_finish_own_sums",
    ]
    operation.weight.transposed = operation.weight.codes.t().contiguous()
    operation.sum = operation.dclip = None
    assert names(launches(operation, SMALL)) == [KERNEL]
    operation, _ = case(41, rounded=True, rest=False)
    assert names(launches(operation, SMALL))[1:] == ["product", "lsq_project_input_gradient"]


def test_parts_of_another_way():
    operation, _ = case(41)
    with gemm.ended_by(None):
        operation.leave_sums(lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
    with pytest.raises(
        ValueError, match=r"are \[6, 52\], and products as they are tuned now leave \[2, 52\]"
    ):
        launches(operation, SMALL)


def test_what_the_kernel_does_not_take():
    operation, _ = case(41, rounded=True)
    weight = operation.weight.codes.t().contiguous()
    with pytest.raises(ValueError, match="ends by tiles has floats"):
        input_gradient_product(operation, SMALL, weight, torch.empty(2, 52))
    operation, _ = case(7, columns=40)
    operation.weight.transposed = operation.weight.codes.t().contiguous()
    with pytest.raises(ValueError, match="outer width is 40.*multiple of 16"):
        launches(operation, SMALL)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
@pytest.mark.parametrize(
    "tile",
    [
        SMALL,
        WARPGROUPS[1],
        *(pytest.param(one, marks=pytest.mark.thorough) for one in (TILES[0], WARPGROUPS[-1])),
    ],
    ids=str,
)
def test_no_conflicts_whole_sectors_and_no_more_multiplications_than_needed(tile):
    operation, _ = case(128, rest=False, columns=128, padded=128)
    (entry,) = of_kernel(in_dtype(operation, torch.bfloat16), tile)
    found, of = traffic(entry)
    operation, weight, *_ = entry.arguments
    assert found.shared_passes == found.shared_least
    assert multiplications(found, tile) == 128**3
    gradient, weight = of[id(operation.gradient.codes)].reads, of[id(weight)].reads
    assert gradient.bytes == 128**3 // tile.columns and gradient.sectors * 32 == gradient.bytes
    assert weight.bytes == 128**3 // tile.rows and weight.sectors * 32 == weight.bytes
    dx = of[id(operation.dx)].writes
    assert dx.bytes == 2 * 128**2 and dx.sectors * 32 == dx.bytes


def of_kernel(operation, tile) -> list[Launch]:
    return [
        entry
        for entry in launches(operation, tile)
        if isinstance(entry, Launch) and entry.kernel.name == KERNEL
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    for tile in (largest_tile(target), SMALL):
        (entry,) = of_kernel(case(7)[0], tile)
        assert_two_blocks_fit(entry, target)


def test_wgmma_spills_nothing():
    assert_nothing_spills(lambda tile: of_kernel(case(7)[0], tile)[0])
