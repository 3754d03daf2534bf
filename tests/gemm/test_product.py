"""The int8 product is exact, in every layout, and refuses what could overflow."""

import pytest
import torch

from lsq import gemm
from lsq.gemm.product import check_inner


def random_codes(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def exact(a, b):
    return (a.long() @ b.long().t()).to(torch.int32)


@pytest.mark.parametrize("rows", [1, 7, 16, 41, 341])
@pytest.mark.parametrize("inner, columns", [(16, 16), (48, 112), (512, 32), (2048, 16)])
@pytest.mark.parametrize("transposed", ["neither", "first", "second", "both"])
def test_exact_in_every_layout(rows, inner, columns, transposed):
    a = random_codes(inner, rows).t() if transposed in ("first", "both") else random_codes(rows, inner)
    b = random_codes(inner, columns).t() if transposed in ("second", "both") else random_codes(columns, inner)
    wanted = exact(a, b)
    assert torch.equal(gemm.int8_product(a, b), wanted)
    assert torch.equal(gemm.reference(a, b), wanted)
    out = torch.full((rows, columns), 5, dtype=torch.int32)
    assert gemm.int8_product(a, b, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("inner", [1, 3, 7, 41, 341])
def test_the_inner_dimension_may_be_odd(inner):
    """Gradients of weights sum over rows, of which there may be any number."""
    a, b = random_codes(inner, 48).t(), random_codes(inner, 32).t()
    assert torch.equal(gemm.int8_product(a, b), exact(a, b))


def test_the_largest_sums_fit():
    a = torch.full((1, gemm.LARGEST_INNER), 127, dtype=torch.int8)
    b = torch.full((16, gemm.LARGEST_INNER), -127, dtype=torch.int8)
    wanted = -gemm.LARGEST_INNER * 127**2
    assert wanted > -(2**31)
    assert (gemm.int8_product(a, b) == wanted).all()
    assert (gemm.reference(a, b) == wanted).all()


def test_what_could_overflow_is_refused():
    check_inner(gemm.LARGEST_INNER)
    wide = torch.zeros(1, gemm.LARGEST_INNER + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"{gemm.LARGEST_INNER + 1} values.*{gemm.LARGEST_INNER}"):
        gemm.int8_product(wide, wide)
