"""The kernels that make tiles of logits and keep none: losses, gradients, and what they ask of a
GPU."""

import math
import shutil

import pytest
import torch

from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, run
from tests.ops.test_vocabulary_loss import gradient_of, of_codes, rounded_of
from tests.ops.tiles import (
    SMALL,
    TARGETS,
    TILES,
    WARPGROUPS,
    assert_two_blocks_fit,
    in_one,
    largest_tile,
    launches,
    names,
    traffic,
    with_tiles,
)


def loss_by(tile, operation):
    return in_one(operation, tile, exact=False)


def turns():
    """Three steps along K and more, all rows of a tile's quarter, and many tiles of a row."""
    for tile in (*TILES, *WARPGROUPS):
        operation = of_codes(150, 290, 304, inner=272)
        operation.prediction.target[::2] = 289  # in the last tile
        found = loss_by(tile, operation)
        in_one(gradient_of(found), tile, exact=False)
        in_one(rounded_of(found), tile, exact=False)
    many = of_codes(3, 2040, 2048)  # 32 tiles, which 8 threads of a row take
    loss_by(SMALL, many)
    loss_by(SMALL, of_codes(1030, 33, 48))


@pytest.mark.parametrize(
    "tile, rows, vocabulary, padded", with_tiles([(1, 2, 16), (41, 270, 272), (130, 129, 144)])
)
def test_every_tile(tile, rows, vocabulary, padded):
    """What the gradient is does not depend on the tile; sums of a row are added up in the order of
    its tiles."""
    operation = of_codes(rows, vocabulary, padded)
    operation.prediction.target[-1] = vocabulary - 1
    found, host = loss_by(tile, operation), on_cpu(operation)
    for name in ("loss", "nll", "normaliser", "bound"):
        torch.testing.assert_close(getattr(found, name), getattr(host, name), rtol=2e-6, atol=1e-6)
    for gradient in (gradient_of(host), rounded_of(host)):
        made, other = (in_one(gradient, one, exact=False) for one in (tile, SMALL))
        assert torch.equal(
            *(one.dlogits if one.rounded is None else one.rounded.codes for one in (made, other))
        )


@pytest.mark.parametrize("inner", [16, 64, 336])
def test_steps_along_the_inner_dimension(inner):
    found = loss_by(SMALL, of_codes(7, 33, 48, inner=inner))
    in_one(rounded_of(found), SMALL, exact=False)


@pytest.mark.parametrize(
    "word",
    [
        0,
        127,
        128,
        255,
        269,
        *(pytest.param(one, marks=pytest.mark.thorough) for one in (63, 64, 256)),
    ],
)
def test_targets_at_the_edges_of_tiles(word):
    operation = of_codes(5, 270, 272)
    operation.prediction.target[:] = word
    found = loss_by(TILES[0], operation)
    in_one(gradient_of(found), TILES[0], exact=False)


@pytest.mark.parametrize("word", [-7, 33, 47, 48, 10**12])
def test_a_target_outside_the_vocabulary_makes_the_losses_and_its_row_nan(word):
    operation = of_codes(7, 33, 48)
    normaliser = on_cpu(operation).normaliser
    operation.prediction.target[:] = 5
    operation.prediction.target[2] = word
    with_one = run(operation)
    assert with_one.loss.isnan() and with_one.nll.isnan()
    assert with_one.bound.isnan().tolist() == [False, False, True, False, False, False, False]
    torch.testing.assert_close(with_one.normaliser, normaliser)
    gradient = run(rounded_of(with_one)).rounded
    assert gradient.scale[2].isnan() and not gradient.codes[2].any() and gradient.codes[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_as_floats(dtype):
    found = on_cpu(of_codes(70, 270, 272))
    in_one(gradient_of(found), SMALL, dtype, exact=False)


def test_a_row_that_is_not_finite_has_no_codes():
    found = on_cpu(of_codes(7, 33, 48))
    found.prediction.target[:] = 5
    found.bound[:] = 1.0
    found.bound[2], found.normaliser[2] = math.inf, math.nan
    made = in_one(rounded_of(found), SMALL, exact=False).rounded
    assert made.scale[2].isnan() and not made.codes[2].any() and made.codes[3].any()


def test_launches():
    """All rows and words at once, whatever their number."""
    loss = of_codes(300, 33, 48)
    assert names(launches(loss, None)) == [
        "lsq_vocabulary_loss_product",
        "lsq_vocabulary_losses",
        "lsq_sum_losses",
    ]
    assert names(launches(rounded_of(on_cpu(loss)), None)) == [
        "lsq_vocabulary_loss_gradient_product"
    ]
    none = of_codes(0, 33, 48)
    assert names(launches(none, None)) == ["lsq_sum_losses"] and not launches(
        gradient_of(none), None
    )


def test_what_the_kernels_do_not_take():
    with pytest.raises(ValueError, match="outer width is 33.*multiple of 16"):
        launches(of_codes(7, 33, 33), SMALL)
    with pytest.raises(ValueError, match="inner width of an int8 product is 40.*multiple of 16"):
        launches(of_codes(7, 33, 48, inner=40), SMALL)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
@pytest.mark.parametrize("tile", [TILES[0], SMALL], ids=str)
def test_no_conflicts_whole_sectors_and_no_logits(tile):
    rows, inner, words = 128, 128, 256
    loss = on_cpu(of_codes(rows, words, words, inner=inner))
    forward, join, _ = launches(loss, tile)
    (backward,) = launches(rounded_of(loss), tile)
    for entry in (forward, backward):
        found, of = traffic(entry)
        assert found.shared_passes == found.shared_least
        assert found.instructions["mma"] == rows * inner * words // (16 * 32 * 8)
        x = of[id(entry.arguments[0].prediction.x.coded.codes)].reads
        assert x.bytes == rows * inner * words // tile.columns and x.sectors * 32 == x.bytes
    parts, codes = (
        of_parts(forward),
        traffic(backward)[1][id(backward.arguments[0].rounded.codes)].writes,
    )
    assert (
        parts.writes.bytes == 32 * rows * words // tile.columns
        and parts.writes.sectors * 32 == parts.writes.bytes
    )
    assert codes.bytes == rows * words and codes.sectors * 32 == codes.bytes
    read = of_parts(join, 1).reads
    assert read.bytes == parts.writes.bytes and read.sectors * 32 == read.bytes


def of_parts(entry, place=2):
    return traffic(entry)[1][id(entry.arguments[place])]


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    loss = on_cpu(of_codes(7, 33, 48))
    for tile in (largest_tile(target), SMALL):
        for operation in (loss, rounded_of(loss), gradient_of(loss)):
            assert_two_blocks_fit(launches(operation, tile)[0], target)
