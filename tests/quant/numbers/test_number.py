"""What holds for every number format, and what is published about single ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lsq.quant.numbers import (
    NUMBERS,
    NumberFormat,
    fit_codebook,
    fp8_e4m3,
    fp8_e5m2,
    integer,
    lloyd_max,
    lloyd_max_distortion,
    logarithmic,
    nf4,
    number_format,
)

# those take a second to find
FORMATS = [name for name in NUMBERS if not name.startswith(("lloyd5", "lloyd6"))]


def usable(form: NumberFormat) -> torch.Tensor:
    return torch.tensor(sorted({value for value in form.values if math.isfinite(value)}))


def samples(form: NumberFormat) -> torch.Tensor:
    """Values, the middles between them, what lies beyond, and random floats."""
    values = usable(form)
    middles = (values[1:] + values[:-1]) / 2
    beyond = form.largest * torch.tensor([1.01, -1.01, 1e30, -1e30])
    return torch.cat([values, middles, beyond, torch.randn(999) * form.largest / 2])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_rounds_to_the_nearest(name):
    form = number_format(name)
    x = samples(form)
    found = form.decode(form.encode(x))
    distance = (x.double()[:, None] - usable(form).double()).abs().amin(1)
    torch.testing.assert_close((x.double() - found.double()).abs(), distance, rtol=1e-5, atol=0)
    again = form.encode(found)
    assert torch.equal(again, form.encode(x))  # idempotent
    ordered = form.decode(form.encode(x.sort().values))
    assert (ordered.diff() >= 0).all()  # monotone
    infinite = form.decode(form.encode(torch.tensor([math.inf, -math.inf])))
    assert torch.equal(infinite, usable(form)[[-1, 0]])
    assert form.symmetric == (name != "nf4")
    if form.symmetric:
        nonzero = x[x != 0]
        assert torch.equal(form.decode(form.encode(-nonzero)), -form.decode(form.encode(nonzero)))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_is_a_code_or_that_of_zero(name):
    form = number_format(name)
    found = form.decode(form.encode(torch.tensor(math.nan)))
    assert (
        found.isnan()
        if any(map(math.isnan, form.values))
        else found.abs() == usable(form).abs().min()
    )


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FORMATS),
    shape=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 99),
)
def test_packed_codes_come_back(name, shape, seed):
    form = number_format(name)
    codes = torch.randint(
        len(form.values), shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = form.pack(codes)
    count, stored = form.word
    assert packed.dtype == torch.uint8 and packed.numel() == -(-codes.numel() // count) * stored
    assert torch.equal(form.unpack(packed, tuple(shape)), codes)
    with pytest.raises(
        ValueError, match=f"{form.name} .* take {packed.numel()} bytes, but packed holds"
    ):
        form.unpack(torch.cat([packed, packed.new_zeros(1)]), tuple(shape))


def test_widths():
    assert [number_format(f"int{bits}").bits for bits in range(2, 9)] == [2, 3, 4, 5, 6, 7, 8]
    assert {
        name: number_format(name).bits for name in ("fp4-e2m1", "log4.3", "nf4", "ternary")
    } == {"fp4-e2m1": 4, "log4.3": 8, "nf4": 4, "ternary": 1.6}


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_rounded_half_to_even_in_twos_complement(bits):
    form, largest = integer(bits), 2 ** (bits - 1) - 1
    x = torch.arange(-largest - 2, largest + 2.25, 0.25)
    wanted = x.round().clamp(-largest, largest)
    codes = form.encode(x)
    assert torch.equal(form.decode(codes), wanted)
    assert torch.equal(codes.int(), wanted.int() & 2**bits - 1)


@pytest.mark.parametrize(
    "form, dtype",
    [(fp8_e4m3(), torch.float8_e4m3fn), (fp8_e5m2(), torch.float8_e5m2)],
    ids=lambda one: str(one)[:16],
)
def test_fp8_is_pytorchs(form, dtype):
    x = samples(form).clamp(-form.largest, form.largest)
    x = x[x != 0]
    wanted = x.to(dtype)
    assert torch.equal(form.decode(form.encode(x)), wanted.float())
    every = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        form.decode(every), every.view(dtype).float(), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "name, normal, relative, absolute",
    [
        ("fp8-e4m3", 2**-6, 1 / 17, 2**-10),
        ("fp8-e5m2", 2**-14, 1 / 9, 2**-17),
        ("fp4-e2m1", 1, 1 / 5, 1 / 4),
        ("log3.0", 2**-6, 1 / 3, 2**-7),
        ("nf4", 1, 0, 0.152),
    ],
)
def test_errors_are_as_large_as_docstrings_say(name, normal, relative, absolute):
    form = number_format(name)
    x = torch.cat(
        [torch.logspace(-8, 0, 20_001) * form.largest, torch.linspace(-normal, normal, 20_001)]
    )
    error = (form.decode(form.encode(x)) - x).abs()
    large = x.abs() > normal * (1 - 1e-6)
    assert error[~large].max() <= absolute * (1 + 1e-6) and error[~large].max() > 0.97 * absolute
    if relative:
        worst = (error / x.abs())[large].max()
        assert 0.97 * relative < worst <= relative * (1 + 1e-6)


def test_fp4_has_the_values_of_the_standard():
    assert number_format("fp4-e2m1").values[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)


@pytest.mark.parametrize("whole, fraction, published", [(4, 3, 0.044), (5, 2, 0.087)])
def test_worst_relative_error_of_logarithms(whole, fraction, published):
    """Half a step of the logarithm is 2^(1/16) - 1 = 4.4 % for 4.3; the nearest value is a little
    better."""
    form = logarithmic(whole, fraction)
    x = 2 ** -torch.linspace(0, 2**whole - 0.5, 100_001, dtype=torch.float64)
    worst = float(((form.decode(form.encode(x.float())).double() - x) / x).abs().max())
    ratio = 2 ** (1 / 2**fraction)
    assert worst == pytest.approx((ratio - 1) / (ratio + 1), rel=1e-3) and worst == pytest.approx(
        published, rel=0.03
    )


def test_nf4_has_the_published_values():
    """Dettmers et al. 2023, appendix E, whose quantiles are rounded to float32."""
    published = [
        -1.0,
        -0.6961928,
        -0.5250731,
        -0.3949175,
        -0.2844414,
        -0.1847734,
        -0.0910500,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.3379152,
        0.4407098,
        0.5626170,
        0.7229568,
        1.0,
    ]
    torch.testing.assert_close(
        torch.tensor(nf4().values), torch.tensor(published), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    "source, published",
    [
        ("gaussian", [0.3634, 0.1175, 0.03454, 0.009497]),
        ("laplacian", [0.5, 0.1762, 0.0545, 0.0154]),
    ],
)
def test_lloyd_max_distortions_are_the_published_ones(source, published):
    """Max 1960, table I; for the Laplacian Adams and Giesler 1978."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400_000, generator=random)
    if source == "laplacian":
        x = torch.empty(400_000).exponential_(generator=random) * x.sign() / math.sqrt(2)
    for bits, distortion in enumerate(published, 1):
        assert lloyd_max_distortion(source, bits) == pytest.approx(distortion, rel=3e-3)
        form = lloyd_max(source, bits)
        measured = float((form.decode(form.encode(x)) - x).square().mean())
        assert measured == pytest.approx(distortion, rel=0.03)


def test_a_fitted_codebook_is_nearly_the_best():
    x = torch.randn(100_000)
    form = fit_codebook(x, 4)
    error = float((form.decode(form.encode(x)) - x).square().mean())
    assert form.symmetric and 0.0 in form.values and len(form.values) == 16
    assert lloyd_max_distortion("gaussian", 4) < error < 1.2 * lloyd_max_distortion("gaussian", 4)


def test_a_fitted_codebook_finds_values_that_are_there():
    x = torch.tensor([0.0, 1.0, -2.0, 5.0, 5.0, 0.0, math.nan, math.inf])
    assert sorted(set(fit_codebook(x, 3).values)) == [-5, -2, -1, 0, 1, 2, 5]


def test_what_is_refused():
    with pytest.raises(ValueError, match="bits is 9; it must be"):
        integer(9)
    with pytest.raises(ValueError, match="log0.3 has 0 whole and 3"):
        logarithmic(0, 3)
    with pytest.raises(
        ValueError, match="source 'cauchy' and 4 bits; allowed: 'gaussian', 'laplacian'"
    ):
        lloyd_max("cauchy", 4)
    with pytest.raises(
        ValueError, match="2 magnitudes above 0 differ .* too few for 7 values of 4 bits"
    ):
        fit_codebook(torch.tensor([1.0, -2.0, 2.0]), 4)
    with pytest.raises(ValueError, match="codes of ternary are from 0 to 2, not from 1 to 3"):
        number_format("ternary").decode(torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="none has 3 codes for 1 finite values"):
        NumberFormat(name="none", values=(1.0, 1.0, math.nan))
