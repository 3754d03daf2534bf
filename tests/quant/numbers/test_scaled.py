"""Scales of every grain and storage against plain loops; special values; orders that are
published."""

import math

import pytest
import torch

from lsq.quant import quantize
from lsq.quant.numbers import (
    PRESETS,
    SCALES,
    Encoded,
    as_matrix,
    grain,
    lloyd_max,
    nf4,
    number,
    number_format,
    scaled_format,
    signal_to_noise,
)
from lsq.quant.numbers.scaled import PowerScales

GRAINS = ["tensor", "row", "channel", "group16", "group64", "block3x5"]
NAMES = [
    *PRESETS,
    *(f"int5/{one}" for one in GRAINS),
    "log4.3/row/bfloat16",
    "lloyd3-laplacian/group32",
    "ternary/row",
]


def decoded(name: str, x: torch.Tensor, clip="absmax") -> torch.Tensor:
    form = scaled_format(name)
    return form.decode(form.encode(x, clip))


def quality(name: str, x: torch.Tensor, clip="absmax") -> float:
    return signal_to_noise(x, decoded(name, x, clip))


@pytest.mark.parametrize("name", GRAINS)
def test_blocks_are_cut_and_spread(name):
    blocks, x = grain(name), torch.randn(7, 37)
    rows, columns = blocks.rows or 7, blocks.columns or 37
    cut, inside = blocks.split(x)
    down, across = blocks.grid((7, 37))
    largest = torch.empty(down, across)
    for i in range(down):
        for j in range(across):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            found, used = (
                cut[i * across + j],
                slice(None) if inside is None else inside[i * across + j],
            )
            assert torch.equal(found[used], block.flatten())
            largest[i, j] = block.abs().max()
    wanted = torch.stack([largest[i // rows][[j // columns for j in range(37)]] for i in range(7)])
    assert torch.equal(blocks.spread(largest, (7, 37)).expand(7, 37), wanted)
    assert torch.equal(cut.abs().amax(1).view(down, across), largest)


@pytest.mark.parametrize("name", GRAINS)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "e8m0"])
def test_scales_are_the_largest_of_their_block(name, stored):
    form, x = scaled_format(f"int4/{name}/{stored}"), torch.randn(3, 5, 37)
    encoded = form.encode(x)
    found = form.scales.decode(encoded.scales)
    wanted = form.grain.split(x.view(15, 37))[0].abs().amax(1).view(found.shape) / 7
    if stored == "e8m0":
        wanted = 2 ** wanted.double().log2().ceil()
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=2**-8 if stored == "bfloat16" else 1e-6, atol=0
    )
    scale = form.grain.spread(found, (15, 37))
    codes = (x.view(15, 37) / scale).round().clamp(-7, 7)
    assert torch.equal(form.decode(encoded), (codes * scale).view(x.shape))


def test_int8_rows_are_those_of_the_quantiser():
    x, clip = torch.randn(9, 33), 1 + torch.rand(9)
    encoded = scaled_format("int8/row").encode(x, clip[:, None])
    wanted = quantize(x, clip)
    assert torch.equal(encoded.codes.view(torch.int8), wanted.codes)
    assert torch.equal(encoded.scales.flatten(), wanted.scale)


@pytest.mark.parametrize("name", ["int4/group16/uint4", "int4/group16/uint6", "nvfp4"])
def test_two_levels_of_scales(name):
    form, x = scaled_format(name), torch.randn(6, 40) * torch.logspace(-2, 2, 6)[:, None]
    encoded = form.encode(x)
    assert isinstance(encoded.scales, Encoded) and encoded.scales.codes.shape == (6, 3)
    asked = form.grain.split(x)[0].abs().amax(1).view(6, 3) / form.number.largest
    outer = asked.amax(None if name == "nvfp4" else 1, keepdim=True) / form.scales.number.largest
    torch.testing.assert_close(encoded.scales.scales, outer, rtol=1e-6, atol=0)
    whole = (
        (asked / outer).to(torch.float8_e4m3fn).float()
        if name == "nvfp4"
        else (asked / outer).round().clamp(min=1)
    )
    torch.testing.assert_close(form.scales.decode(encoded.scales), whole * outer)


@pytest.mark.parametrize("name", NAMES)
def test_what_holds_for_every_format(name):
    x = torch.randn(6, 50)
    form = scaled_format(name)
    encoded = form.encode(x)
    found = form.decode(encoded)
    assert signal_to_noise(x, found) > (3 if name.startswith("ternary") else 8)
    # powers of two change nothing but scales
    torch.testing.assert_close(decoded(name, 4 * x), 4 * found)
    if form.number.symmetric:
        assert torch.equal(decoded(name, -x), -found)
    clips = torch.full(form.grain.grid((6, 50)), 2.0)
    once = decoded(name, x, clips)
    torch.testing.assert_close(decoded(name, once, clips), once, rtol=1e-6, atol=0)
    zeros = x.index_fill(0, torch.tensor([2]), 0.0)
    assert (decoded(name, zeros)[2] == 0).all() or 0.0 not in form.number.values
    for shape in ((0, 5), (4, 0), (0,), (7,), ()):
        assert decoded(name, torch.ones(shape)).shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_seen(name, bad):
    form, x = scaled_format(name), torch.randn(6, 50)
    x[3, 7] = bad
    found = form.decode(form.encode(x))
    wrong = ~form.grain.split(x)[0].isfinite().all(1).view(form.grain.grid((6, 50)))
    shared = form.grain.spread(wrong, (6, 50)).expand(6, 50)
    assert found[shared].isnan().all()
    if isinstance(form.scales, type(SCALES["float32"]) | PowerScales):
        assert not found[~shared].isnan().any()
    given = decoded(name, x, torch.tensor(3.0))
    assert given[3, 7].isnan() if math.isnan(bad) else given[3, 7] > 1.4


def test_powers_of_two():
    scales = torch.tensor(
        [0.0, 2.0**-140, 2.0**-127, 0.5, 0.5000001, 1.0, 1.5, 3e38, math.inf, math.nan]
    )
    stored = PowerScales().encode(scales)
    assert stored.tolist() == [0, 0, 0, 126, 127, 127, 128, 254, 255, 255]
    assert PowerScales().decode(stored)[:8].tolist() == [2.0**-127] * 3 + [
        0.5,
        1.0,
        1.0,
        2.0,
        2.0**127,
    ]


def test_bits_with_scales():
    bits = {name: scaled_format(name).bits_per_value((128, 1024)) for name in PRESETS}
    assert bits["int8-row"] == 8 + 32 / 1024 and bits["mxint8"] == 8.25 and bits["mxfp4"] == 4.25
    assert (
        bits["nvfp4"] == 4.5 + 32 / 2**17
        and bits["vsquant4"] == 4.25 + 32 / 1024
        and bits["nf4-64"] == 4.5
    )
    assert scaled_format("ternary/tensor").total_bits((3, 7)) == 40 + 32
    assert scaled_format("int4/group16").total_bits((2, 3, 17)) == 51 * 8 + 12 * 32
    assert math.isnan(scaled_format("mxfp4").bits_per_value((0, 4)))


def test_dimensions_and_number_formats():
    assert [as_matrix(shape) for shape in ((), (3,), (2, 3), (2, 3, 5))] == [
        (1, 1),
        (1, 3),
        (2, 3),
        (6, 5),
    ]
    assert number_format("int4") is scaled_format("int4/row").number


def test_integers_win_at_8_bits_and_floats_at_4_under_powers_of_two():
    """Chen et al. 2025 (arXiv:2510.25602): on Gaussian blocks of 32, MXINT8 beats MXFP8 and MXFP4
    does not lose."""
    x = torch.randn(256, 512)
    assert quality("mxint8", x) > quality("mxfp8-e4m3", x) + 8 > quality("mxfp8-e5m2", x) + 13
    assert quality("mxfp4", x) > quality("int4/group32/e8m0", x)


def test_vectors_of_4_bits_beat_channels_of_6_on_heavy_tails():
    """The order that Dai et al. 2021 report: integer scales of vectors are worth more than two
    bits."""
    torch.manual_seed(0)
    # Student's t of 2 degrees
    x = torch.randn(256, 1024) / (torch.randn(2, 256, 1024) ** 2).mean(0).sqrt()
    assert (
        quality("vsquant4", x) > quality("int6/row", x)
        and scaled_format("vsquant4").bits_per_value(x.shape) < 4.3
    )
    assert quality("vsquant4-6", x) > quality("vsquant4", x) > quality("int4/row", x, "mse")


def test_signal_to_noise():
    x = torch.tensor([3.0, 4.0])
    assert signal_to_noise(x, x + torch.tensor([0.3, -0.4])) == pytest.approx(20)
    assert signal_to_noise(x, x) == math.inf and math.isnan(signal_to_noise(0 * x, 0 * x))
    assert signal_to_noise(0 * x, x) == -math.inf and math.isnan(signal_to_noise(x, x * math.nan))


def test_clips_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"\[3\] do not fit x of shape \[4, 40\] in mxfp4; give shape \[4, 2\] or"
    ):
        scaled_format("mxfp4").encode(torch.ones(4, 40), torch.ones(3))


def test_negative_clips_are_refused():
    with pytest.raises(
        ValueError, match="a clip given for vsquant4 is -0.5; clips must not be below 0"
    ):
        scaled_format("vsquant4").encode(torch.randn(4, 16), torch.tensor(-0.5))


def test_defaults_of_pytorch_change_nothing():
    x = torch.randn(4, 64, dtype=torch.float32)
    form = scaled_format("fp8-e5m2/row/e8m0")
    expected = form.decode(form.encode(x))
    tables = number.boundaries_of
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        tables.cache_clear()
        with torch.device("meta"):
            found = form.decode(form.encode(x))
            assert lloyd_max("gaussian", 2).name == "lloyd2-gaussian" and nf4().largest == 1
    finally:
        torch.set_default_dtype(dtype)
        tables.cache_clear()
    assert found.dtype == torch.float32 and torch.equal(found, expected)
