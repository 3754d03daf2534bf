"""Words that would repeat an n-gram, drawn words, and groups that avoid each other's words."""

import math

import pytest
import torch

from lsq.serving import SearchOptions, search
from lsq.serving.continuations import NO_WORD, GroupSelection, SamplingSelection, repeating
from tests.serving.test_search import END, SOURCES, UNKNOWN, table


def looked_for(row: list[int], size: int) -> set[int]:
    """The words after which the row would end in an n-gram that it has already."""
    before = {tuple(row[i : i + size]) for i in range(len(row) - size + 1)}
    return {word for word in range(5) if tuple([*row, word][-size:]) in before}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 12])
def test_every_repeating_word_and_no_other(size, length):
    rows = torch.randint(0, 5, (9, length), generator=torch.Generator().manual_seed(length))
    found = repeating(rows, size)
    assert found.dtype == torch.int64 and len(found) == 9
    for row, words in zip(rows.tolist(), found.tolist(), strict=True):
        assert set(words) - {NO_WORD} == looked_for(row, size)
    # no more columns than needed
    assert repeating(torch.tensor([[1, 2, 3, 1], [1, 2, 3, 4]]), 2).tolist() == [[2], [NO_WORD]]


FOUND = torch.tensor([0.0, -0.4, -1.0, -3.0])
SENTENCE = torch.zeros(1, dtype=torch.int64)


def choose(selection: GroupSelection, rows: int, totals: torch.Tensor | None):
    words = torch.arange(4).expand(1, rows, -1)
    return selection.choose(words, FOUND.expand(1, rows, -1), totals, SENTENCE)


@pytest.mark.parametrize("strength, same", [(0.0, True), (9.0, False), (-1.0, True)])
def test_strength(strength, same):
    options = SearchOptions(beam=4, diverse_beam_groups=2, diverse_beam_strength=strength)
    words = choose(GroupSelection(options, 4, 9), 1, None).words.view(2, 2)  # candidates by groups
    assert (words[:, 0].tolist() == words[:, 1].tolist()) == same
    assert options.all_words == (strength < 0)


def test_a_vocabulary_too_small_for_the_groups_is_refused():
    with pytest.raises(ValueError, match="diverse_beam_groups is 2, but 4 words allow a beam of 3"):
        GroupSelection(SearchOptions(beam=4, diverse_beam_groups=2), 3, 4)


@pytest.mark.parametrize(
    "given, allowed",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"sampling_topk": 2}, [1, 3]),
        ({"sampling_topk": 9}, [0, 1, 2, 3, 4]),
        ({"sampling_topp": 0.3}, [1]),
        ({"sampling_topp": 0.5}, [1, 3]),
    ],
)
def test_words_are_drawn_as_often_as_they_are_probable(given, allowed):
    probabilities, draws = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]), []
    for seed in (1, 1, 2):
        options, generator = SearchOptions(sampling=True, beam=4000, **given), torch.Generator()
        selection = SamplingSelection(options, 4000, 5, generator.manual_seed(seed))
        row = torch.arange(5).expand(1, 1, -1)
        draws.append(selection.choose(row, probabilities.log().expand(1, 1, -1), None, SENTENCE))
    expected = torch.zeros(5).index_put((torch.tensor(allowed),), probabilities[allowed])
    shares = torch.bincount(draws[0].words[0], minlength=5) / 4000
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.04)
    assert (shares[expected == 0] == 0).all()
    torch.testing.assert_close(draws[0].scores[0], probabilities[draws[0].words[0]].log())
    assert draws[0].words.equal(draws[1].words)
    assert len(allowed) == 1 or not draws[0].words.equal(draws[2].words)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_without_words_does_not_stop_the_others(value):
    options = SearchOptions(sampling=True, beam=2)
    selection = SamplingSelection(options, 2, 3, torch.Generator().manual_seed(1))
    found = torch.tensor([[[value] * 3, [-math.inf, 0.0, -math.inf]]])
    words, sentences = torch.arange(3).expand(1, 2, 3), torch.zeros(1, dtype=torch.int64)
    chosen = selection.choose(words, found, torch.zeros(1, 2), sentences)
    assert (
        chosen.words[0, 1] == 1 and chosen.scores[0, 1] == 0 and not chosen.scores[0, 0] > -math.inf
    )


@pytest.mark.parametrize("given", [{}, {"sampling_topp": 0.9}, {"sampling_topk": 3}])
def test_the_largest_reward_of_the_unknown_word_draws_it(given):
    options = SearchOptions(sampling=True, beam=2, unk_penalty=-80, max_len_b=3, **given)
    for found in search(table(), SOURCES, options):
        assert found[0].words.tolist() == [UNKNOWN] * 3 + [END] and math.isfinite(found[0].score)
