"""Words that would repeat an n-gram, beside a look at every place."""

import pytest
import torch

from lsq.serving.continuations import NO_WORD, repeating


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


def test_no_more_columns_than_needed():
    assert repeating(torch.tensor([[1, 2, 3, 1], [1, 2, 3, 4]]), 2).tolist() == [[2], [NO_WORD]]
