"""Products by bins against decimal arithmetic, and products of decoded floats against both."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn

import lsq
from lsq.quant.numbers import find_number, scaled_format
from lsq.study.logarithms import logarithmic_product
from tests.ops.compare import refused

EPSILON = 2**-24


def codes_of(number: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Every code but NaN, some zeros among them."""
    count = len(find_number(number).values)
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(count, (rows, columns), generator=random)
    return torch.where(codes == count // 2, 0, codes).to(torch.uint8)


def magnitudes(number: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sums of the products' magnitudes."""
    a, b = (find_number(number).decode(codes).double().abs() for codes in (x, weight))
    return a @ b.t()


@pytest.mark.parametrize("number", ["log2.1", "log3.0", "log3.2", "log4.3", "log5.2"])
def test_bins_hold_what_decimal_arithmetic_finds(number):
    whole, fraction = map(int, number[3:].split("."))
    x, weight = codes_of(number, 3, 37, 1), codes_of(number, 5, 37, 2)
    found, half = logarithmic_product(x, weight, number), 2 ** (whole + fraction)
    bound = magnitudes(number, x, weight) * 2**-51
    with localcontext() as context:
        context.prec = 60
        step = Decimal(2) ** (Decimal(1) / 2**fraction)
        values = [Decimal(0), *(step ** (code - half + 1) for code in range(1, half)), Decimal(0)]
        values += [-value for value in values[1:half]]
        for i, row in enumerate(x.tolist()):
            for j, other in enumerate(weight.tolist()):
                exact = sum(values[a] * values[b] for a, b in zip(row, other, strict=True))
                error = abs(Decimal(float(found[i, j])) - exact)
                assert error <= float(bound[i, j])


@pytest.mark.parametrize("columns", [1, 33, 500])
@pytest.mark.parametrize("number", ["log3.2", "log4.3"])
def test_decoded_floats_err_as_little_as_stated(number, columns):
    """(K + 2) 2^-24 of the sum of magnitudes: both decodings, the product and the sum round."""
    x, weight = codes_of(number, 4, columns, 3), codes_of(number, 6, columns, 4)
    decode = find_number(number).decode
    error = decode(x) @ decode(weight).t() - logarithmic_product(x, weight, number)
    assert (error.abs() <= (columns + 2) * EPSILON * magnitudes(number, x, weight)).all()
    assert error.any()


@pytest.mark.parametrize("number", ["log3.2", "log4.3"])
def test_a_layer_keeps_to_the_bound(number):
    """Values are multiplied by their scales before: 2^-24 more for each."""
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(96, 7, bias=False)), torch.randn(9, 96)
    w = model[0].weight.detach().clone()
    formats = f"{number}/group96"
    quant = lsq.QuantConfig(weight_format=formats, activation_format=formats, clip_init="absmax")
    lsq.convert(model, quant, minimum_width=1)
    model(x)  # measures clips
    y = model.eval()(x).detach().double()
    a, b = (scaled_format(formats).encode(one) for one in (x, w))
    scales = a.scales.double() * b.scales.double().t()
    exact = logarithmic_product(a.codes, b.codes, number) * scales
    assert (y - exact).abs().max() > 0
    bound = (96 + 4) * EPSILON * magnitudes(number, a.codes, b.codes) * scales
    assert ((y - exact).abs() <= bound).all()


def test_nan_makes_nan_and_zero_counts_nothing():
    x = torch.tensor([[0, 255], [128, 0]])  # log4.3: zero, -1, NaN, zero
    found = logarithmic_product(x, torch.tensor([[127, 127], [1, 0]]), "log4.3")
    assert found[0].tolist() == [-1, 0] and all(map(math.isnan, found[1].tolist()))


def test_other_numbers_are_refused():
    with refused("number is 'nf4'; give a logarithmic one, such as 'log4.3'"):
        logarithmic_product(torch.zeros(1, 1), torch.zeros(1, 1), "nf4")
