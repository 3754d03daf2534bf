"""Checksums find every single wrong sum, and pass right ones in every layout; operands make the
largest sums."""

import pytest
import torch
from lsq.gemm.tuner.operands import RowChecksums, laid, whole_numbers

from lsq import gemm
from lsq.gemm.tuner import operands
from tests.gemm.operands import codes, matmul


@pytest.mark.parametrize("m", [1, 7, 41])
@pytest.mark.parametrize("n, k", [(16, 16), (48, 7), (1, 2048)])
@pytest.mark.parametrize("elements", [1, 100, 2**18])
def test_right_sums_pass(monkeypatch, m, n, k, elements):
    monkeypatch.setattr(operands, "_ELEMENTS", elements)
    for a, b in [(codes(m, k), codes(n, k)), (codes(k, m).t(), codes(k, n).t())]:
        sums = gemm.reference(a, b)
        assert RowChecksums(a, b).first_wrong_row(sums) is None


def test_the_largest_sums_pass():
    a = torch.full((3, gemm.LARGEST_INNER), 127, dtype=torch.int8)
    b = torch.full((2, gemm.LARGEST_INNER), -127, dtype=torch.int8)
    assert RowChecksums(a, b).first_wrong_row(gemm.reference(a, b)) is None


@pytest.mark.parametrize("change", [1, -1, 2**16, 2**30, -(2**31)])
def test_any_wrong_sum_is_found(change):
    a, b = codes(9, 64), codes(20, 64)
    checked, sums = RowChecksums(a, b), gemm.reference(a, b)
    for row in range(9):
        for column in range(20):
            wrong = sums.clone()
            wrong[row, column] = (int(wrong[row, column]) + change + 2**31) % 2**32 - 2**31
            assert checked.first_wrong_row(wrong) == row


def test_exchanged_columns_and_rows_are_found():
    a, b = codes(9, 64), codes(20, 64)
    checked, sums = RowChecksums(a, b), gemm.reference(a, b)
    assert checked.first_wrong_row(sums.flip(1)) == 0
    assert checked.first_wrong_row(sums.flip(0)) == 0
    sums[5:] = sums[5:].roll(1, 0)
    assert checked.first_wrong_row(sums) == 5


@pytest.mark.parametrize("largest", [7, 127])
def test_operands_have_all_values_and_lie_as_the_key_says(largest):
    key = matmul(leading_a=80)
    for name, strides in {"a": (80, 1), "b": (64, 1)}.items():
        flat = whole_numbers(key, name, largest, torch.Generator().manual_seed(0))
        made = laid(flat, key, name)
        assert made.shape == key.matrices[name] and made.stride() == strides
        assert (
            made.dtype == torch.int8
            and made.abs().max() == largest
            and made.unique().numel() > largest
        )
        assert (made[0, 1:] == largest).all() and (made[:, 0] == -largest).all()
