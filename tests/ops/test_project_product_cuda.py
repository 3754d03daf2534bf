"""The kernel that multiplies and ends in one: exact against the CPU, and what it makes of a GPU's
memory and banks."""

import math
import shutil

import pytest
import torch

from lsq.emulator import profile
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.project_cuda import project_product
from lsq.program.tensor import VirtualTensor
from tests.ops.compare import empty
from tests.ops.cuda import DTYPES
from tests.ops.test_project import operands, operands_by_row, rounded_project
from tests.ops.tiles import (
    SMALL,
    TARGETS,
    TILES,
    WARPGROUPS,
    assert_nothing_spills,
    assert_two_blocks_fit,
    in_one,
    largest_tile,
    multiplications,
    with_tiles,
)


def rounded(rows, inner, outputs, *end, **given):
    return rounded_project(rows, outputs, *end, **operands(rows, inner, outputs) | given)


def turns():
    """Three steps along K and more, and all rows of a tile's quarter."""
    for tile in (*TILES, *WARPGROUPS):
        in_one(rounded(150, 272, 144, Activation.gelu, 0.1), tile)


@pytest.mark.parametrize(
    "tile, rows, inner, outputs",
    with_tiles([(0, 64, 32), (1, 16, 16), (41, 80, 48), (130, 336, 144)]),
)
def test_codes_are_exact(tile, rows, inner, outputs):
    found = in_one(rounded(rows, inner, outputs), tile)
    assert torch.equal(found.rounded.scale, found.rounded.clip / found.rounded.largest)
    assert rows < 7 or found.rounded.clipped.any()


@pytest.mark.parametrize("tile", [SMALL, WARPGROUPS[-1]], ids=str)
def test_a_scale_for_each_row(tile):
    in_one(rounded_project(41, 80, **operands_by_row(41, 48, 80)), tile)


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("tile", [SMALL, WARPGROUPS[-1], WARPGROUPS[-2]], ids=str)
def test_fewer_steps_than_stages_and_more(tile, steps):
    in_one(rounded(3, 64 * steps + 16, 16), tile)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_end(activation, dropout, bias):
    in_one(rounded(41, 48, 80, activation, dropout, **({} if bias else {"bias": None})), SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 41])
def test_floats(dtype, rows):
    in_one(Project(**operands(rows), out=empty(rows, 32)), SMALL, dtype, exact=False)


@pytest.mark.parametrize("started", [False, True])
def test_nan_poisons_the_scale(started):
    operation = rounded(70, 48, 144)
    operation.rounded.started = started
    operation.bias[100] = math.nan
    assert in_one(operation, SMALL).rounded.scale.isnan()


def test_what_the_kernel_does_not_take():
    with pytest.raises(ValueError, match="inner width of an int8 product is 40.*multiple of 16"):
        project_product(rounded(7, 40, 32), SMALL)
    with pytest.raises(ValueError, match="outer width is 40.*multiple of 16"):
        project_product(rounded(7, 48, 40), SMALL)
    many = VirtualTensor(name="x", shape=(2**23, 16), dtype=torch.int8)
    operation = rounded(7, 16, 16).bind(lambda tensor: many if tensor.shape == (7, 16) else tensor)
    with pytest.raises(
        ValueError, match="8388608 rows are more than 4194240: take smaller batches"
    ):
        project_product(operation, SMALL)


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
    rows, inner, outputs = 128, 128, 128
    operation = rounded(rows, inner, outputs).bind(
        lambda tensor: (
            torch.zeros(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, VirtualTensor)
            else tensor
        )
    )
    entry = project_product(operation, tile)
    (found,) = profile.profile([entry])
    traffic = dict(zip(map(id, profile.operands_of(entry)), found.operands, strict=True))
    assert found.shared_passes == found.shared_least
    assert multiplications(found, tile) == rows * inner * outputs
    x, weight = traffic[id(operation.x.tensor)].reads, traffic[id(operation.weight.codes)].reads
    assert x.bytes == rows * inner * outputs // tile.columns and x.sectors * 32 == x.bytes
    assert (
        weight.bytes == outputs * inner * rows // tile.rows and weight.sectors * 32 == weight.bytes
    )
    codes = traffic[id(operation.rounded.codes)].writes
    assert codes.bytes == rows * outputs and codes.sectors * 32 == codes.bytes


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    for tile in (largest_tile(target), SMALL):
        operation = rounded(7, 48, 32, Activation.gelu, 0.1)
        operation.rounded.started = True
        assert_two_blocks_fit(project_product(operation, tile), target)


@pytest.mark.thorough
def test_wgmma_spills_nothing():
    operation = rounded(7, 48, 32, Activation.gelu, 0.1)
    for started in (False, True):
        operation.rounded.started = started
        assert_nothing_spills(lambda tile: project_product(operation, tile))
