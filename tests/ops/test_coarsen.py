"""CoarsenRows against fractions of Python, for all codes and widths."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from lsq.ops.coarsen import CoarsenRows
from lsq.quant import maximum_code
from tests.ops.compare import compare, empty, on_reference


def coarse_code(code: int, bits: int, of: int = 8) -> int:
    """A code of `of` bits as the nearest multiple of the unit of `bits` bits."""
    most = maximum_code(bits)
    unit = maximum_code(of) // most
    return unit * min(max(round(Fraction(code, unit)), -most), most)


def coarsen(codes: torch.Tensor, widths: list[int], of: int = 8) -> CoarsenRows:
    """Rows of these widths, in codes of `of` bits."""
    largest = maximum_code(of)
    return CoarsenRows(
        codes=codes,
        unit=torch.tensor([largest // maximum_code(bits) for bits in widths], dtype=torch.int8),
        coarse=empty(*codes.shape, dtype=torch.int8),
        largest=largest,
    )


def drawn(rows: int, columns: int) -> CoarsenRows:
    widths = torch.randint(2, 9, (rows,)).tolist()
    return coarsen(torch.randint(-127, 128, (rows, columns), dtype=torch.int8), widths)


@pytest.mark.parametrize("of", range(2, 9))
def test_all_codes_of_all_widths(same_codes, of):
    largest, widths = maximum_code(of), list(range(2, of + 1))
    codes = [*range(-largest, largest + 1), 0]
    codes += [0] * (-len(codes) % 8)
    every = torch.tensor(codes, dtype=torch.int8).repeat(len(widths), 1)
    expected = [[coarse_code(code, bits, of) for code in codes] for bits in widths]
    found = same_codes(coarsen(every, widths, of)).coarse
    assert found.tolist() == expected
    assert torch.equal(found[-1], every[-1]), "rows of all bits do not change"


@pytest.mark.parametrize("shape", [(1, 8), (7, 24), (341, 48), (0, 16)])
def test_shapes(same_codes, shape):
    same_codes(drawn(*shape))


def test_odd_columns():
    """Which no kernel takes."""
    compare(drawn(17, 13), exact=True)


def test_in_place(runs):
    operation = drawn(41, 48)
    wanted = on_reference(operation).coarse
    for found in runs(replace(operation, coarse=operation.codes)):
        assert torch.equal(found.coarse, wanted)
