"""What holds for every number format, what is published about single ones, and values that are
found by the upper half of a float."""

import math

import pytest
import torch

from lsq.quant.numbers import NUMBER_FORMATS, find_number
from lsq.quant.tables import (
    LEVELS,
    RANKS,
    NumberFormat,
    fp8_e4m3,
    fp8_e5m2,
    integer,
    lloyd_max,
    lloyd_max_distortion,
    logarithmic,
    lookup,
    nf4,
)
from tests.ops.compare import refused

# those take a second to find
FORMATS = [name for name in NUMBER_FORMATS if not name.startswith(("lloyd5", "lloyd6"))]


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
    form = find_number(name)
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
    finite = usable(form).tolist()
    assert (set(finite) == {-value for value in finite}) == (name != "nf4")
    if name != "nf4":
        nonzero = x[x != 0]
        assert torch.equal(form.decode(form.encode(-nonzero)), -form.decode(form.encode(nonzero)))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_is_a_code_or_that_of_zero(name):
    form = find_number(name)
    found = form.decode(form.encode(torch.tensor(math.nan)))
    assert (
        found.isnan()
        if any(map(math.isnan, form.values))
        else found.abs() == usable(form).abs().min()
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (2, 9, 4)])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_codes_come_back(name, shape):
    form = find_number(name)
    generator = torch.Generator().manual_seed(len(shape))
    codes = torch.randint(len(form.values), shape, generator=generator, dtype=torch.uint8)
    packed = form.pack(codes)
    count, stored = form.word
    assert packed.dtype == torch.uint8 and packed.numel() == -(-codes.numel() // count) * stored
    assert torch.equal(form.unpack(packed, shape), codes)
    message = f"{form.name} .* take {packed.numel()} bytes, but packed holds"
    with pytest.raises(ValueError, match=message):
        form.unpack(torch.cat([packed, packed.new_zeros(1)]), shape)


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
    form = find_number(name)
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
    assert find_number("fp4-e2m1").values[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)


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
    below = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    above = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    torch.testing.assert_close(
        torch.tensor(nf4().values), torch.tensor(below + above), rtol=0, atol=1e-6
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


def test_what_is_refused():
    with refused("bits is 9; it must be"):
        integer(9)
    with refused("codes of ternary are from 0 to 2, not from 1 to 3"):
        find_number("ternary").decode(torch.tensor([1, 3]))
    with refused("none has 3 codes for 1 finite values"):
        NumberFormat(name="none", values=(1.0, 1.0, math.nan))


def nearest(number: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    """As loops and kernels do it."""
    table = lookup(number, x.device)
    boundaries, values = table[RANKS:].view(torch.float32).view(2, LEVELS)
    rank = table[(x.view(torch.int32) >> 16 & 0xFFFF).long()].long()
    return values[rank + (x > boundaries[rank]).long()]


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_every_find_number_is_found(name):
    """Random bits, all boundaries' neighbours, zeros, subnormal floats and infinities."""
    number = find_number(name)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (20000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    usable = torch.tensor(sorted({value for value in number.values if abs(value) < 1e30}))
    middle = (usable[1:] + usable[:-1]) / 2
    edges = [torch.nextafter(middle, torch.tensor(end)) for end in (-9e9, 9e9)]
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf])
    x = torch.cat(
        [
            bits.view(torch.float32),
            usable,
            middle,
            *edges,
            torch.randn(5000) * number.largest / 2,
            special,
        ]
    )
    x = x[~x.isnan()]
    assert torch.equal(nearest(number, x), number.decode(number.encode(x)))


def test_boundaries_that_lie_too_close_are_refused():
    number = NumberFormat(name="close", values=(1.0, 1.001, 1.002, 1.003))
    with refused("close lie closer than a part in 128"):
        lookup(number, torch.device("cpu"))
