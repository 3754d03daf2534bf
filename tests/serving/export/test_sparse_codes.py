"""Sparse codes in a file: they come back as they were, and what is not sparse stays as it is."""

import pytest
import torch

from lsq.models.sparsity import choose
from lsq.serving.export.sparse_codes import join, split


def tensors(columns: int = 12) -> dict[str, torch.Tensor]:
    torch.manual_seed(columns)
    codes = torch.randint(-127, 128, (5, columns), dtype=torch.int8)
    return {
        "a.codes": codes * choose(codes.int().abs()) if columns % 4 == 0 else codes,
        "a.scale": torch.ones(5),
        "b.codes": torch.ones(5, columns, dtype=torch.int8),
        "words": torch.zeros(3, 4),
    }


@pytest.mark.parametrize("columns", [4, 12, 16, 20])
def test_they_come_back(columns):
    before = tensors(columns)
    stored = split(before)
    assert stored.keys() == before.keys() - {"a.codes"} | {"a.codes.values", "a.codes.indices"}
    after = join(stored)
    assert after.keys() == before.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


def test_widths_that_are_no_multiple_stay_dense():
    before = tensors(10)
    assert split(before).keys() == before.keys() == join(before).keys()
