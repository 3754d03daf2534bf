"""Groups that avoid each other's words."""

import pytest
import torch

from lsq.serving.decode import SearchOptions
from lsq.serving.decode.groups import GroupSelection

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
