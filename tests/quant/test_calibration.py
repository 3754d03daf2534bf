"""Calibration of clips against brute force."""

import math

import pytest
import torch

from lsq.quant import SMALLEST_CLIP, calibrate, check_clip, maximum_code, octav_clip
from tests.ops.compare import refused
from tests.quant.fake import fake_quantize

ALL_BITS = range(2, 9)
INFINITY = math.inf
NAN = math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def squared_errors(x: torch.Tensor, clips: torch.Tensor, maximum: int) -> torch.Tensor:
    """Sum of (x_hat - x)^2 at each clip, exactly and fast, from the sorted magnitudes and their
    running sums.

    With t_j = (j - 1/2) s for j = 1..Q, the code of |x| is the number of t_j at or below it, so
    that sum |x| q = sum_j (sum of |x| >= t_j) and sum q^2 = sum_j (2j - 1) (number of |x| >= t_j).
    """
    magnitudes = x.double().abs().sort().values
    running = torch.cat([torch.zeros(1, dtype=torch.float64), magnitudes.cumsum(0)])
    step = torch.arange(1, maximum + 1, dtype=torch.float64)
    scale = clips.double() / maximum
    first = torch.searchsorted(magnitudes, scale[:, None] * (step - 0.5))
    product = (running[-1] - running[first]).sum(1)
    squares = ((2 * step - 1) * (len(magnitudes) - first)).sum(1)
    return (magnitudes**2).sum() - 2 * scale * product + scale**2 * squares


def heavy_and_light_tails(count: int) -> torch.Tensor:
    """[5, count]: Gaussian, Laplacian, Student t of 3 degrees, Cauchy and uniform; their scales
    differ."""
    random = generator(3)
    normal = torch.randn(4, count, generator=random)
    laplacian = torch.empty(count).exponential_(generator=random) * normal[3].sign()
    student = normal[1] / (torch.randn(3, count, generator=random) ** 2).mean(0).sqrt()
    cauchy = torch.empty(count).cauchy_(generator=random)
    uniform = torch.rand(count, generator=random) - 0.5
    return torch.stack([normal[0], laplacian * 100, student * 1e-3, cauchy, uniform])


def test_squared_errors_of_this_file():
    x = torch.randn(341, dtype=torch.float64, generator=generator())
    clips = torch.linspace(0.1, 4, 41, dtype=torch.float64)
    for bits in ALL_BITS:
        expected = [((fake_quantize(x, clip.view(1), bits) - x) ** 2).sum() for clip in clips]
        torch.testing.assert_close(
            squared_errors(x, clips, maximum_code(bits)), torch.stack(expected)
        )


@pytest.mark.parametrize(
    "bits",
    [pytest.param(bits, marks=() if bits in (2, 8) else pytest.mark.thorough) for bits in ALL_BITS],
)
def test_mse_is_as_good_as_brute_force(bits):
    """Within 0.1 % of the best of 10,000 clips from 0 to absmax, for five distributions, each one
    channel."""
    x = heavy_and_light_tails(200_000)
    clips = calibrate(x, "mse", bits, per_channel=True)
    for row, clip in zip(x, clips, strict=True):
        candidates = torch.linspace(0, float(row.abs().max()), 10_001, dtype=torch.float64)[1:]
        best = squared_errors(row, candidates, maximum_code(bits)).min()
        error = squared_errors(row, clip.view(1), maximum_code(bits))
        assert error <= best * 1.001
    assert torch.equal(calibrate(x[0], "mse", bits), clips[:1])


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("count", (1, 2, 7, 41, 341))
def test_mse_is_never_worse_than_absmax(bits, count):
    x = torch.randn(9, count, generator=generator(count))
    clips, largest = (calibrate(x, method, bits, per_channel=True) for method in ("mse", "absmax"))
    maximum = maximum_code(bits)
    for row, clip, other in zip(x, clips, largest, strict=True):
        error, reference = (squared_errors(row, c.view(1), maximum) for c in (clip, other))
        assert error <= reference * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("bits", ALL_BITS)
def test_mse_on_one_magnitude_finds_it(bits):
    """The plain fixed-point iteration never settles here."""
    x = torch.tensor([0.3, -0.3, 0.0, 0.3, 0.0])
    torch.testing.assert_close(fake_quantize(x, calibrate(x, "mse", bits), bits), x)


def test_mse_ignores_how_many_zeros_there_are():
    x = torch.randn(2_000, generator=generator())
    clips = [calibrate(one, "mse", 4) for one in (torch.cat([x, torch.zeros(50_000)]), x)]
    torch.testing.assert_close(*clips, rtol=1e-2, atol=0)


@pytest.mark.parametrize("factor", (2.0**-30, 2.0**100))
def test_mse_scales_with_its_input(factor):
    x = torch.randn(3, 341, generator=generator())
    assert torch.equal(octav_clip(x * factor, 8, True), octav_clip(x, 8, True) * factor)


@pytest.mark.parametrize("bits", (2, 5, 8))
def test_mse_near_a_clip_of_before_is_as_good_as_brute_force(bits):
    """Within 0.2 %: 100,000 values leave little to luck."""
    x = heavy_and_light_tails(100_000)
    clips = octav_clip(x, bits, True, before=octav_clip(x * 1.1, bits, True))
    for row, clip in zip(x, clips, strict=True):
        candidates = torch.linspace(0, float(row.abs().max()), 4_001, dtype=torch.float64)[1:]
        best = squared_errors(row, candidates, maximum_code(bits)).min()
        assert squared_errors(row, clip.view(1), maximum_code(bits)) <= best * 1.002


@pytest.mark.parametrize("before", (1e-9, 1e-6, 0.5, 2.0, 1e6, 0.0, -1.0, INFINITY, NAN))
def test_mse_begins_anew_where_a_clip_of_before_is_far_off(before):
    x = torch.randn(3, 341, generator=generator())
    anew = octav_clip(x, 8, True)
    assert torch.equal(octav_clip(x, 8, True, before=anew * before), anew)
    assert octav_clip(torch.zeros(1, 7), before=anew[:1]).item() == SMALLEST_CLIP


def test_mse_in_blocks_equals_row_by_row():
    x = torch.randn(1_000, 300, generator=generator())
    together = octav_clip(x, 6, per_channel=True)
    for row in (0, 435, 436, 437, 999):
        torch.testing.assert_close(octav_clip(x[row], 6), together[row : row + 1])


def test_absmax_and_percentile():
    x = torch.arange(-1_000, 0).float().view(2, 500)
    assert calibrate(x, "absmax").tolist() == [1_000]
    assert calibrate(x, "absmax", per_channel=True).tolist() == [1_000, 500]
    assert calibrate(x, "percentile", percentile=100).tolist() == [1_000]
    assert calibrate(x, "percentile", percentile=99.9).tolist() == [999]
    assert calibrate(x, "percentile", percentile=50, per_channel=True).tolist() == [750, 250]
    assert calibrate(x, "percentile", percentile=1e-6).tolist() == [1]


def test_fixed_measures_nothing():
    assert calibrate(
        torch.tensor([[NAN], [1.0]]), "fixed", per_channel=True, fixed=16
    ).tolist() == [16, 16]
    with refused("fixed="):
        calibrate(torch.ones(1), "fixed")
    with refused("fixed is -1"):
        calibrate(torch.ones(1), "fixed", fixed=-1.0)


@pytest.mark.parametrize("method", ("absmax", "percentile", "mse"))
@pytest.mark.parametrize("value", (0.0, 2.0**-149))
def test_zeros_get_the_clip_of_other_rows_or_the_smallest(method, value):
    x = torch.tensor([[1.0] * 5, [value] * 5, [3.0] * 5])
    clip = calibrate(x, method, per_channel=True)
    assert clip.tolist() == [1, 2, 3]
    check_clip(clip, "clip")
    assert calibrate(x[1:2], method, per_channel=True).item() == SMALLEST_CLIP
    assert torch.equal(fake_quantize(x, clip)[1], torch.zeros(5))


@pytest.mark.parametrize("method", ("absmax", "percentile", "mse"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_calibration_returns_float32_without_history(method, dtype):
    weight = torch.nn.Parameter(torch.randn(7, 9, 3, generator=generator()).to(dtype))
    clip = calibrate(weight, method, per_channel=True)
    assert (clip.dtype, clip.shape, clip.requires_grad) == (torch.float32, (7,), False)


@pytest.mark.parametrize("method", ("absmax", "percentile", "mse"))
@pytest.mark.parametrize("value", (NAN, INFINITY, -INFINITY))
def test_calibration_refuses_values_that_are_not_finite(method, value):
    with refused("1 of 3 values are NaN or infinite"):
        calibrate(torch.tensor([1.0, value, 2.0]), method)


def test_calibration_refuses_bad_arguments():
    with refused("'max'.*'fixed', 'absmax', 'percentile', 'mse'"):
        calibrate(torch.ones(3), "max")
    with refused("percentile is 0"):
        calibrate(torch.ones(3), "percentile", percentile=0)
    with refused(r"empty tensor \(shape \[0, 4\]\)"):
        calibrate(torch.ones(0, 4), "absmax")
