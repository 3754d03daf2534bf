"""The kernels of NextWords: every tile, ties, more best words than a tile has, padding, and what
they ask of a GPU."""

import math
import shutil

import pytest
import torch

from lsq.ops.next_words import NextWords
from lsq.ops.packed_project import PackedWeight
from lsq.program.values import Weight
from tests.ops.compare import empty, on_cpu, on_reference, rounded, weight_format_of
from tests.ops.cuda import run
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
    names,
    traffic,
    with_tiles,
)
from tests.sampling import in_turn


def example(rows, words, best, asked, *, every=False, inner=64, spread=127):
    """With few different codes, and scales that are all the same, where `spread` is small: many
    logits are equal."""
    torch.manual_seed(rows + words)
    padded = -(-words // 16) * 16
    codes = torch.randint(-spread, spread + 1, (padded, inner), dtype=torch.int8)
    codes[words:] = 127  # what lies beyond the vocabulary counts for nothing
    scale = 0.001 + 0.001 * torch.rand(padded) if spread > 9 else torch.full((padded,), 0.01)
    x = rounded(rows, inner).bare()
    x.codes.clamp_(-spread, spread)
    return NextWords(
        x=x,
        weight=Weight(format=weight_format_of(), codes=codes, scale=scale),
        vocabulary=words,
        wanted=torch.randint(0, words, (rows, asked)) if asked else None,
        wanted_scores=empty(rows, asked) if asked else None,
        words=empty(rows, best, dtype=torch.int64) if best else None,
        scores=empty(rows, best) if best else None,
        every=empty(rows, words) if every else None,
    )


def turns():
    """Three steps along the inner dimension and more, all rows of a tile's quarter, many parts,
    groups and words."""
    for tile in (*TILES, *WARPGROUPS):
        in_one(example(150, 290, 3, 1, inner=272), tile, exact=False)
    in_one(example(3, 16440, 100, 20, every=True, inner=16), SMALL, exact=False)
    in_one(example(3, 300, 3, 1, inner=1552), SMALL, exact=False)


def assert_found(operation, found):
    """The words are exactly those of the reference."""
    if operation.words is not None:
        assert torch.equal(found.words, on_reference(operation).words)


@pytest.mark.parametrize(
    "tile, rows, words, best, asked, every",
    with_tiles(
        [
            (1, 60, 8, 1, False),
            (41, 271, 5, 0, True),
            (130, 1100, 16, 2, False),
            (3, 2064, 0, 3, True),
        ]
    ),
)
def test_every_tile(tile, rows, words, best, asked, every):
    operation = example(rows, words, best, asked, every=every)
    assert_found(operation, in_one(operation, tile, exact=False))


@pytest.mark.parametrize(
    "words, best", [(60, 60), (61, 61), (700, 64), (700, 65), (1003, 500), (9, 1), (2, 2)]
)
def test_any_number_of_best_words(words, best):
    operation = example(3, words, best, 1)
    assert_found(operation, in_one(operation, SMALL, exact=False))


@pytest.mark.parametrize("best, spread", in_turn([1, 7, 30, 150], [0, 1], 1))
def test_of_equal_words_the_lower_number_comes_first(best, spread):
    operation = example(5, 901, best, 0, spread=spread, inner=16)
    found = in_one(operation, SMALL, exact=False)
    assert_found(operation, found)
    assert spread or found.words.tolist() == [list(range(best))] * 5


@pytest.mark.parametrize(
    "inner", [16, 80, *(pytest.param(more, marks=pytest.mark.thorough) for more in (512, 1040))]
)
def test_any_inner_width(inner):
    operation = example(7, 333, 6, 2, every=True, inner=inner)
    assert_found(operation, in_one(operation, SMALL, exact=False))


@pytest.mark.parametrize("words", [335, 336])
def test_the_log_probabilities_are_those_of_the_cpu(words):
    operation = example(9, words, 12, 3, every=True)
    found = run(operation)
    weight, operation.weight = operation.weight, None
    operation.packed_weight = PackedWeight.of(weight.codes, weight.scale)
    host = on_cpu(operation)
    assert torch.equal(found.words, host.words)
    for name in ("scores", "wanted_scores", "every"):
        torch.testing.assert_close(getattr(found, name), getattr(host, name), rtol=1e-6, atol=2e-6)
    assert torch.equal(found.every.gather(1, found.words), found.scores)
    assert torch.equal(found.every.gather(1, found.wanted), found.wanted_scores)


def test_logits_far_from_zero():
    operation = example(4, 300, 4, 1, every=True)
    operation.x.scale.fill_(300.0)
    assert_found(operation, in_one(operation, SMALL, exact=False))


def test_nan_reaches_the_scores():
    operation = example(2, 300, 4, 1, every=True)
    operation.x.scale.fill_(math.nan)
    found = run(operation)
    assert (
        found.scores.isnan().all()
        and found.wanted_scores.isnan().all()
        and found.every.isnan().all()
    )
    assert found.words.ge(0).all() and found.words.lt(300).all()


@pytest.mark.parametrize("word", [-1, 300, 303, 304, 10**12])
def test_a_wanted_word_outside_the_vocabulary_is_nan(word):
    operation = example(2, 300, 0, 2)
    operation.wanted[1, 0] = word
    assert run(operation).wanted_scores.isnan().tolist() == [[False, False], [True, False]]


def test_one_word_of_nan():
    """All scores of a row are NaN then, and its words those of the others."""
    operation = example(2, 300, 300, 0)
    operation.weight.scale[17] = math.nan
    found = run(operation)
    assert found.scores.isnan().all() and found.words[:, -1].eq(17).all()
    assert torch.equal(found.words.sort(dim=1).values, torch.arange(300).expand(2, 300))


def test_launches():
    """The same two whatever is wanted; none without rows."""
    for best, asked, every in ((8, 1, False), (0, 0, True), (0, 2, False)):
        found = launches(example(5, 300, best, asked, every=every), None)
        assert names(found) == ["lsq_next_words_product", "lsq_next_words"]
    assert not launches(example(0, 300, 8, 0), None)


def test_what_the_kernels_do_not_take():
    operation = example(2, 300, 4, 0)
    with pytest.raises(ValueError, match="inner width of an int8 product is 40.*multiple of 16"):
        launches(example(2, 300, 4, 0, inner=40), None)
    weight, operation.weight = operation.weight, None
    with pytest.raises(ValueError, match="no packed weights on CUDA"):
        launches(operation, None)
    operation.weight = weight
    with pytest.raises(ValueError, match="packed weights on the CPU"):
        on_cpu(operation)
    with pytest.raises(ValueError, match="reads one weight"):
        NextWords(x=operation.x, vocabulary=300)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="instructions are counted by objdump")
def test_no_conflicts_whole_sectors_and_no_logits():
    rows, words, inner, best, asked = 128, 256, 64, 3, 2
    tile = TILES[0]
    product, join = launches(example(rows, words, best, asked, inner=inner), tile)
    found, of = traffic(product)
    given, (_, _, groups, parts) = product.arguments[0], product.arguments
    assert found.shared_passes == found.shared_least
    assert found.instructions["mma"] == rows * inner * words // (16 * 32 * 8)
    assert of[id(given.weight.codes)].reads.bytes == words * inner
    assert (
        of[id(groups)].writes.bytes == 4 * rows * words // 8 == of[id(groups)].writes.sectors * 32
    )
    assert of[id(parts)].writes.bytes == 8 * rows * words // (tile.columns // 2)
    found, of = traffic(join)
    codes = of[id(given.weight.codes)].reads
    assert codes.bytes == rows * (8 * best + asked) * inner == codes.sectors * 32
    assert of[id(parts)].reads.bytes == 2 * 8 * rows * words // (tile.columns // 2)


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    for tile in (largest_tile(target), SMALL):
        product, join = launches(example(7, 300, 4, 1), tile)
        assert_two_blocks_fit(product, target)
    assert_two_blocks_fit(join, target)


def test_nothing_spills_by_warpgroups():
    assert_nothing_spills(lambda tile: launches(example(7, 300, 4, 1), tile)[0])
