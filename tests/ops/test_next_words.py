"""NextWords: best words, wanted ones, and all, of any number of rows and words."""

import pytest
import torch
from torch.testing import assert_close

from lsq.native import tiles
from lsq.ops.next_words import NextWords
from lsq.ops.packed_project import PackedWeight
from lsq.quant import Grain
from lsq.quant.formats import Int4
from tests.ops.compare import empty, on_cpu, on_reference, rounded


def example(rows, words, best, asked, *, every=False, instructions=None, inner=64):
    torch.manual_seed(rows + words)
    padded = -(-words // 16) * 16
    codes, scale = (
        torch.randint(-127, 128, (padded, inner), dtype=torch.int8),
        0.001 + 0.001 * torch.rand(padded),
    )
    return NextWords(
        x=rounded(rows, inner).bare(),
        packed_weight=PackedWeight.of(codes, scale, instructions),
        vocabulary=words,
        wanted=torch.randint(0, words, (rows, asked)) if asked else None,
        wanted_scores=empty(rows, asked) if asked else None,
        words=empty(rows, best, dtype=torch.int64) if best else None,
        scores=empty(rows, best) if best else None,
        every=empty(rows, words) if every else None,
    )


def same(operation):
    found, expected = on_cpu(operation), on_reference(operation)
    if operation.words is not None:
        assert torch.equal(found.words, expected.words)
    for name in ("scores", "wanted_scores", "every"):
        if getattr(operation, name) is not None:
            assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=2e-6)
    return found


@pytest.mark.parametrize(
    "rows, words, best, asked",
    [
        (1, 2, 2, 1),
        (3, 255, 7, 2),
        (2, 1000, 1000, 0),
        (65, 700, 8, 1),
        (5, 4099, 20, 3),
        (7, 37, 0, 2),
    ],
)
@pytest.mark.parametrize("every", [False, True])
def test_against_the_reference(rows, words, best, asked, every):
    same(example(rows, words, best, asked, every=every))


@pytest.mark.parametrize("instructions", tiles.usable())
def test_every_instruction(instructions):
    same(example(9, 601, 5, 1, instructions=instructions, inner=80))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_weights_of_4_bits(rows):
    operation, form = example(rows, 601, 5, 1, inner=80), Int4(name="int4", bits=8, grain=Grain.ROW)
    stored, scale = form.encode(torch.randn(608, 80), torch.tensor([3.0]))
    found = []
    for packed in (
        PackedWeight.of_int4(stored, scale, 80),
        PackedWeight.of(form.unpack(stored, 80), scale),
    ):
        operation.packed_weight = packed
        found.append(same(operation))
    assert torch.equal(found[0].words, found[1].words) and torch.equal(
        found[0].scores, found[1].scores
    )


def test_of_equal_words_the_lower_number_comes_first():
    operation = example(2, 800, 12, 0)
    operation.packed_weight = PackedWeight.of(
        torch.ones(800, 64, dtype=torch.int8), torch.full((800,), 0.01)
    )
    assert same(operation).words.tolist() == [list(range(12))] * 2


def test_results_do_not_depend_on_threads():
    operation, threads, found = example(6, 3000, 9, 1, every=True), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(on_cpu(operation))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other.words, found[0].words) and torch.equal(other.every, found[0].every)


def test_nan_reaches_the_scores():
    operation = example(2, 300, 4, 1)
    operation.x.scale.fill_(float("nan"))
    found = on_cpu(operation)
    assert found.scores.isnan().all() and found.words.ge(0).all() and found.words.lt(300).all()
