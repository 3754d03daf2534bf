"""Clips of blocks against plain definitions and published optima."""

import math

import pytest
import torch

from lsq.quant import octav_clip
from lsq.quant.calibration import _octav_fixed_point
from lsq.quant.numbers import METHODS, scaled, scaled_format, signal_to_noise
from lsq.quant.numbers.scaled import measure


def quality(name: str, x: torch.Tensor, clip, **options) -> float:
    form = scaled_format(name)
    return signal_to_noise(x, form.decode(form.encode(x, clip, **options)))


def source(name: str, count: int) -> torch.Tensor:
    """Magnitudes at evenly spaced quantiles of a Gaussian (variance 1) or a Laplacian (mean
    magnitude 1)."""
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return (
        torch.special.ndtri(0.5 + quantiles / 2) if name == "gaussian" else -torch.log1p(-quantiles)
    )


@pytest.mark.parametrize(
    "name, published",
    [
        ("gaussian", [1.71, 2.15, 2.55, 2.93, 3.28, 3.61, 3.92]),
        ("laplacian", [2.83, 3.89, 5.03, 6.20, 7.41, 8.64, 9.89]),
    ],
)
def test_octavs_optimum_is_the_published_one(name, published):
    """At 2 to 8 bits, for steps of 2 c / 2^bits, as Banner et al. 2018 (arXiv:1810.05723) derive
    them.

    They count the rounding error of clipped values, too, which OCTAV does not: 2 % at 2 bits.
    """
    x = source(name, 2**18)
    rows = (x / x.max()).float()[None]
    for bits, clip in enumerate(published, 2):
        found = float(_octav_fixed_point(rows, 2 ** (bits - 1)) * x.max())
        assert found == pytest.approx(clip, rel=0.02 if bits == 2 else 0.007)


def test_two_bits_of_a_gaussian_have_maxs_step():
    """Max 1960, table I for 3 levels: outer ones at 1.224, distortion 0.1902."""
    x = source("gaussian", 2**16).float()
    for name in ("int2/tensor", "ternary/tensor"):
        form = scaled_format(name)
        clip = float(measure(form, x[None], "mse", 100.0))
        assert clip == pytest.approx(1.224, rel=0.02)
        error = (form.decode(form.encode(x, "mse")) - x).square().mean()
        assert float(error) == pytest.approx(0.1902, rel=0.002)


@pytest.mark.parametrize(
    "name", ["int4/group16", "fp4-e2m1/group32", "mxfp4", "nf4/row", "lloyd4-gaussian/block4x30"]
)
def test_mse_is_as_good_as_a_search(name):
    form, x = scaled_format(name), torch.randn(8, 90) ** 3
    grid = form.grain.grid((8, 90))
    largest = measure(form, x, "absmax", 100.0).view(grid)
    best = torch.full(grid, math.inf)
    for ratio in torch.linspace(0.05, 2, 400):
        rest = (form.decode(form.encode(x, ratio * largest)) - x).square()
        best = torch.minimum(best, form.grain.split(rest)[0].sum(1).view(grid))
    rest = (form.decode(form.encode(x, "mse")) - x).square().sum()
    assert rest < 1.05 * best.sum()


def test_percentiles_leave_their_share_inside():
    x = torch.arange(1.0, 101).flip(0).view(1, 100)
    for name, width in (("int8/row", 100), ("int8/group40", 40)):
        blocks = [sorted(block.flatten().tolist()) for block in x.split(width, 1)]
        wanted = [block[math.ceil(0.9 * len(block)) - 1] for block in blocks]
        assert measure(scaled_format(name), x, "percentile", 90.0).tolist() == pytest.approx(wanted)
    rare = torch.zeros(1, 1000).index_fill(1, torch.tensor([5]), 3.0)
    assert measure(scaled_format("int8/row"), rare, "percentile", 99.0).tolist() == [3.0]


def test_kl_clips_few_bits_and_not_many():
    x = torch.randn(2, 2**13)
    largest = x.abs().amax(1)
    few = measure(scaled_format("int4/row"), x, "kl", 100.0) / largest
    many = measure(scaled_format("int8/row"), x, "kl", 100.0) / largest
    assert (few < 0.9).all() and (few > 0.4).all() and (many > 0.8).all()
    assert quality("int4/row", x, "kl") > quality("int4/row", x, "absmax")
    together = measure(scaled_format("int4/group64"), x, "kl", 100.0)
    ratio = together / scaled_format("int4/group64").grain.split(x)[0].abs().amax(1)
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["int4/row", "mxfp4", "nvfp4", "vsquant4", "lloyd2-laplacian/block3x16"]
)
def test_special_blocks(name, method):
    form, x = scaled_format(name), torch.randn(5, 35)
    x[1], x[2, 3], x[4, 5] = 0.0, math.nan, -math.inf
    clips = measure(form, x, method, 99.0)
    blocks, _ = form.grain.split(x)
    assert torch.equal(clips.isnan(), ~blocks.isfinite().all(1))
    assert torch.equal(clips == 0, (blocks == 0).all(1))
    assert measure(form, x[:0], method, 99.0).shape == (0,)
    tiny = torch.randn(5, 35)
    small, plain = (measure(form, scale * tiny, method, 99.0) for scale in (2.0**-60, 1.0))
    torch.testing.assert_close(small * 2.0**60, plain)


def test_octav_is_what_integers_take():
    x = torch.randn(6, 64)
    found = measure(scaled_format("int3/row"), x, "mse", 1.0)
    torch.testing.assert_close(found, octav_clip(x, 3, True), rtol=1e-5, atol=0)


def test_what_is_refused():
    with pytest.raises(
        ValueError,
        match="clip is 'mean'; allowed: 'absmax', 'percentile', 'mse', 'kl', or a tensor",
    ):
        scaled_format("mxfp4").encode(torch.ones(3), "mean")
    with pytest.raises(ValueError, match="percentile is 0; it must be above 0"):
        scaled_format("mxfp4").encode(torch.ones(3), "percentile", percentile=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["int4/channel", "ternary/block3x5", "nvfp4", "vsquant4", "fp8-e4m3/tensor/e8m0"]
)
def test_views_are_measured_as_their_copies(name, method):
    view = torch.randn(33, 3, 17, generator=torch.Generator().manual_seed(2)).transpose(0, 2)
    form = scaled_format(name)
    found, expected = (form.decode(form.encode(x, method)) for x in (view, view.contiguous()))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", ["int8-row", "mxint8", "mxfp4", "nvfp4", "vsquant6", "lloyd1-laplacian/row"]
)
def test_the_largest_floats_stay_finite(name, method):
    x = torch.linspace(-1, 1, 64).view(2, 32) * torch.finfo(torch.float32).max
    form = scaled_format(name)
    assert form.decode(form.encode(x, method)).isfinite().all()


def test_blocks_are_searched_as_if_each_were_alone(monkeypatch):
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(3))
    for name in ("nvfp4", "vsquant4", "int8/block7x7"):
        form = scaled_format(name)
        expected = form.encode(x, "mse")
        monkeypatch.setattr(scaled, "TOGETHER", 1)
        assert torch.equal(form.encode(x, "mse").codes, expected.codes)
        monkeypatch.undo()
