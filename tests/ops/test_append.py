"""Append: rows of each sentence stay in order, codes and floats."""

import pytest
import torch

from lsq.ops.append import Append
from tests.ops.compare import compare, empty


def append_of(batch: int, past: int, width: int, *, codes: bool) -> Append:
    """B sentences of P rows, and one row more of each."""
    if codes:
        rows = [
            torch.randint(-127, 128, (count, width), dtype=torch.int8)
            for count in (batch * past, batch)
        ]
        out = empty(batch * (past + 1), width, dtype=torch.int8)
        return Append(before=rows[0], now=rows[1], batch=batch, out=out)
    before, now = torch.randn(batch * past, width), torch.randn(batch, width)
    return Append(
        before_floats=before,
        now_floats=now,
        batch=batch,
        out_floats=empty(batch * (past + 1), width),
    )


@pytest.mark.parametrize("batch, past, width", [(0, 0, 16), (1, 0, 16), (3, 7, 33), (7, 41, 48)])
@pytest.mark.parametrize("codes", [False, True])
def test_one_row_more(batch, past, width, codes):
    operation = append_of(batch, past, width, codes=codes)
    found = compare(operation)
    before, now = (
        (operation.before, operation.now)
        if codes
        else (operation.before_floats, operation.now_floats)
    )
    for sentence in range(batch):
        own = (found.out if codes else found.out_floats)[
            sentence * (past + 1) : (sentence + 1) * (past + 1)
        ]
        assert torch.equal(own[:-1], before[sentence * past : (sentence + 1) * past])
        assert torch.equal(own[-1], now[sentence])
