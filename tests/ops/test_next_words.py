"""NextWords: best words, wanted ones and all, of packed weights on the CPU and by tiles on CUDA."""

import math

import pytest
import torch
from torch.testing import assert_close

from lsq.native import tiles
from lsq.ops.next_words import NextWords
from lsq.ops.packed_weight import PackedWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import empty, on_cpu, on_reference, refused, rounded, weight_format_of
from tests.ops.cuda import run
from tests.ops.tiles import SMALL, in_one, launches, with_tiles
from tests.sampling import first, in_turn


def plain_words(rows, words, best, asked, *, every=False, inner=64, spread=127) -> NextWords:
    """For CUDA. Of small `spread`, with equal scales: many logits are equal."""
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


def packed(operation: NextWords, instructions: str | None = None) -> NextWords:
    """The same for the CPU."""
    changed = operation.bind(lambda tensor: tensor)
    changed.weight = None
    weight = operation.weight
    changed.packed_weight = PackedWeight.of(weight.codes, weight.scale, instructions)
    return changed


def next_words(*sizes, **options) -> NextWords:
    """For the CPU."""
    return packed(plain_words(*sizes, **options))


def words_by(tile, operation: NextWords) -> NextWords:
    """By a tile; None: on the CPU. The words are exactly those of the reference."""
    found = on_cpu(operation) if tile is None else in_one(operation, tile, exact=False)
    expected = on_reference(operation)
    assert operation.words is None or torch.equal(found.words, expected.words)
    for name in ("scores", "wanted_scores", "every"):
        if getattr(operation, name) is not None:
            assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=2e-6)
    return found


@pytest.fixture
def made(where):
    """Run an operation that `plain_words` made, where the test runs."""
    return lambda one: words_by(None, packed(one)) if where == "cpu" else words_by(SMALL, one)


@pytest.mark.parametrize(
    "rows, words, best, asked",
    [
        *((1, 2, 2, 1), (3, 60, 60, 1), (3, 61, 61, 1), (3, 700, 64, 1), (3, 700, 65, 1)),
        *((3, 1003, 500, 0), (3, 9, 1, 1), (3, 255, 7, 2), (65, 700, 8, 1), (7, 37, 0, 2)),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_words_against_the_reference(rows, words, best, asked, every, made):
    made(plain_words(rows, words, best, asked, every=every))


@pytest.mark.parametrize("best, spread", in_turn([1, 7, 30, 150], [0, 1], 1))
def test_of_equal_words_the_lower_number_comes_first(best, spread, made):
    found = made(plain_words(5, 901, best, 0, spread=spread, inner=16))
    assert spread or found.words.tolist() == [list(range(best))] * 5


def test_logits_far_from_zero(made):
    operation = plain_words(4, 300, 4, 1, every=True)
    operation.x.scale.fill_(300.0)
    made(operation)


def test_nan_reaches_the_scores(where):
    operation = plain_words(2, 300, 4, 1, every=True)
    operation.x.scale.fill_(math.nan)
    found = on_cpu(packed(operation)) if where == "cpu" else run(operation)
    assert all(one.isnan().all() for one in (found.scores, found.wanted_scores, found.every))
    assert found.words.ge(0).all() and found.words.lt(300).all()


@pytest.mark.parametrize("instructions", tiles.usable())
def test_words_by_every_instruction(instructions):
    words_by(None, packed(plain_words(9, 601, 5, 1, inner=80), instructions))
    words_by(None, packed(plain_words(5, 4099, 20, 3), instructions))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_weights_of_4_bits(rows):
    operation, form = next_words(rows, 601, 5, 1, inner=80), WEIGHT_FORMATS["int4"](8, Grain.ROW)
    stored, scale = form.encode(torch.randn(608, 80), torch.tensor([3.0]))
    found = []
    for weight in (
        PackedWeight.of_int4(stored, scale, 80),
        PackedWeight.of(form.unpack(stored, 80), scale),
    ):
        operation.packed_weight = weight
        found.append(words_by(None, operation))
    assert torch.equal(found[0].words, found[1].words)
    assert torch.equal(found[0].scores, found[1].scores)


def test_weights_that_it_does_not_take():
    operation = plain_words(2, 300, 4, 0)
    with refused("packed weights on the CPU"):
        on_cpu(operation)
    with refused("no packed weights on CUDA"):
        launches(packed(operation), None)
    with refused("reads one weight"):
        NextWords(x=operation.x, vocabulary=300)


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
def test_every_tile_on_cuda(tile, rows, words, best, asked, every):
    words_by(tile, plain_words(rows, words, best, asked, every=every))


@pytest.mark.parametrize("inner", first([16, 80, 512, 1040], 2))
def test_any_inner_width_on_cuda(inner):
    words_by(SMALL, plain_words(7, 333, 6, 2, every=True, inner=inner))


@pytest.mark.parametrize("words", [335, 336])
def test_the_log_probabilities_are_those_of_the_cpu_on_cuda(words):
    operation = plain_words(9, words, 12, 3, every=True)
    found, host = run(operation), on_cpu(packed(operation))
    assert torch.equal(found.words, host.words)
    for name in ("scores", "wanted_scores", "every"):
        assert_close(getattr(found, name), getattr(host, name), rtol=1e-6, atol=2e-6)
    assert torch.equal(found.every.gather(1, found.words), found.scores)
    assert torch.equal(found.every.gather(1, found.wanted), found.wanted_scores)


@pytest.mark.parametrize("word", [-1, 300, 303, 304, 10**12])
def test_a_wanted_word_outside_the_vocabulary_is_nan_on_cuda(word):
    operation = plain_words(2, 300, 0, 2)
    operation.wanted[1, 0] = word
    assert run(operation).wanted_scores.isnan().tolist() == [[False, False], [True, False]]


def test_one_word_of_nan_on_cuda():
    """All scores of a row are NaN then, and its words those of the others."""
    operation = plain_words(2, 300, 300, 0)
    operation.weight.scale[17] = math.nan
    found = run(operation)
    assert found.scores.isnan().all() and found.words[:, -1].eq(17).all()
    assert torch.equal(found.words.sort(dim=1).values, torch.arange(300).expand(2, 300))
