"""Groups that avoid each other's words."""

import math

import pytest
import torch

from lsq.serving import SearchOptions, search
from lsq.serving.selection import GroupSelection, SamplingSelection
from tests.serving.test_search import END, SOURCES, UNKNOWN, table

FOUND = torch.tensor([0.0, -0.4, -1.0, -3.0])
SENTENCE = torch.zeros(1, dtype=torch.int64)


def choose(selection: GroupSelection, rows: int, totals: torch.Tensor | None):
    words = torch.arange(4).expand(1, rows, -1)
    return selection.choose(words, FOUND.expand(1, rows, -1), totals, SENTENCE)


def test_penalties_add_up_over_a_hypothesis():
    selection = GroupSelection(
        SearchOptions(beam=3, diverse_beam_groups=3, diverse_beam_strength=0.3), 3, 4
    )
    # word 0 costs 0.3 in the second group, which takes it, and 0.6 in the third
    first = choose(selection, 1, None)
    assert (first.words.tolist(), first.rows.tolist()) == ([[0, 0, 1]], [[0, 0, 0]])
    torch.testing.assert_close(first.scores, torch.tensor([[0.0, -0.3, -0.4]]))
    second = choose(selection, 3, first.scores)  # word 0 costs 0.6 in the second: it was alike once
    assert (second.words.tolist(), second.rows.tolist()) == ([[0, 1, 0]], [[0, 1, 2]])
    torch.testing.assert_close(second.scores, torch.tensor([[0.0, -0.7, -0.7]]))


@pytest.mark.parametrize("strength, same", [(0.0, True), (9.0, False), (-1.0, True)])
def test_strength(strength, same):
    options = SearchOptions(beam=4, diverse_beam_groups=2, diverse_beam_strength=strength)
    words = choose(GroupSelection(options, 4, 9), 1, None).words.view(2, 2)  # candidates by groups
    assert (words[:, 0].tolist() == words[:, 1].tolist()) == same
    assert options.all_words == (strength < 0)


def test_a_vocabulary_too_small_for_the_groups_is_refused():
    with pytest.raises(ValueError, match="diverse_beam_groups is 2, but 4 words allow a beam of 3"):
        GroupSelection(SearchOptions(beam=4, diverse_beam_groups=2), 3, 4)


PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


def draw(beam: int = 4000, totals: torch.Tensor | None = None, seed: int = 1, **given):
    """Words drawn for one sentence, from one row at the first step or from `beam` later."""
    options = SearchOptions(sampling=True, beam=beam, **given)
    selection = SamplingSelection(
        options, beam, len(PROBABILITIES), torch.Generator().manual_seed(seed)
    )
    rows = 1 if totals is None else beam
    words = torch.arange(len(PROBABILITIES)).expand(1, rows, -1)
    return selection.choose(
        words, PROBABILITIES.log().expand(1, rows, -1), totals, torch.zeros(1, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    "given, allowed",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"sampling_topk": 2}, [1, 3]),
        ({"sampling_topk": 9}, [0, 1, 2, 3, 4]),
        ({"sampling_topp": 0.3}, [1]),
        ({"sampling_topp": 0.5}, [1, 3]),
        ({"sampling_topp": 1.0}, [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_words_are_drawn_as_often_as_they_are_probable(given, allowed, first):
    chosen = draw(totals=None if first else torch.full((1, 4000), -2.0), **given)
    expected = torch.zeros(5).index_put((torch.tensor(allowed),), PROBABILITIES[allowed])
    shares = torch.bincount(chosen.words[0], minlength=5) / 4000
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.04)
    assert (shares[expected == 0] == 0).all()
    torch.testing.assert_close(
        chosen.scores[0], PROBABILITIES[chosen.words[0]].log() - 2.0 * (not first)
    )
    assert chosen.rows[0].tolist() == ([0] * 4000 if first else list(range(4000)))


def test_the_seed_decides():
    assert draw(beam=50).words.equal(draw(beam=50).words)
    assert not draw(beam=50).words.equal(draw(beam=50, seed=2).words)


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
