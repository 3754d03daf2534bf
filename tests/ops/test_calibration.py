"""The search for the clip of least error on the CPU against lsq.quant's, and the calibration of many tensors."""

import pytest
import torch

from lsq import quant
from lsq.backends import backend
from lsq.ops.calibration import Calibration, LeastErrorClip
from tests.ops.compare import compare, empty, on_cpu
from tests.quant.fake import fake_quantize


def clip_of(x: torch.Tensor, bits: int = 8) -> LeastErrorClip:
    """What measures the clip of each row of x."""
    return LeastErrorClip(x=x, bits=bits, clip=empty(len(x)), unusable=empty(len(x), dtype=torch.int64))


def measured(x, method: str = "mse", bits: int = 8, *, target: str = "cpu", **options) -> torch.Tensor:
    """The clip of x, as layers measure it."""
    clip = torch.empty(len(x) if options.get("per_channel") else 1)
    calibration = Calibration(backend(target))
    calibration.measure("x", x, clip, method, bits, **options)
    calibration.finish()
    return clip


def error(x, clip, bits):
    return (fake_quantize(x, clip, bits) - x).double().square().reshape(len(clip), -1).sum(1)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy", "uniform"])
def test_error_is_as_small_as_the_reference_finds(kind, per_channel, bits):
    x = {
        "normal": torch.randn(7, 1001),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((7, 1001)),
        "heavy": torch.distributions.StudentT(3.0).sample((7, 1001)),
        "uniform": torch.rand(7, 1001) - 0.5,
    }[kind]
    found = measured(x, bits=bits, per_channel=per_channel)
    expected = quant.octav_clip(x, bits, per_channel)
    assert found.shape == expected.shape == (7 if per_channel else 1,) and found.dtype == torch.float32
    assert (error(x, found, bits) <= error(x, expected, bits) * 1.001).all()


def test_sample_of_a_long_tensor():
    x = torch.randn(1200, 1024)
    found, expected = measured(x), quant.octav_clip(x)
    assert (error(x, found, 8) <= error(x, expected, 8) * 1.001).all()


def test_rows_of_zeros_get_the_mean_of_the_others():
    x = torch.tensor([[0.0, 0.0], [0.0, -3.0], [2.0, 2.0], [0.0, 1e-30]])
    found = compare(clip_of(x))
    torch.testing.assert_close(found.clip, torch.tensor([2.5, 3.0, 2.0, 2.5]), rtol=2e-3, atol=0.0)
    assert on_cpu(clip_of(torch.zeros(3, 2))).clip.tolist() == [quant.SMALLEST_CLIP] * 3


def test_values_that_are_not_finite_are_counted_and_measured_as_zeros():
    x = torch.randn(4, 33)
    poisoned, zeroed = x.clone(), x.clone()
    where = (torch.tensor([0, 2, 2, 3]), torch.tensor([5, 0, 32, 7]))
    poisoned[where] = torch.tensor([float("nan"), float("inf"), float("-inf"), float("nan")])
    zeroed[where] = 0.0
    found = compare(clip_of(poisoned))
    assert found.unusable.tolist() == [1, 0, 2, 1]
    assert torch.equal(found.clip, on_cpu(clip_of(zeroed)).clip)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floats_are_measured_as_float32(dtype):
    x = torch.randn(3, 17, 8).to(dtype)
    for per_channel in (False, True):
        found = measured(x, per_channel=per_channel)
        assert torch.equal(found, measured(x.float(), per_channel=per_channel))


def test_other_methods_are_the_quantisers():
    x = torch.randn(41, 16)
    torch.testing.assert_close(measured(x, "absmax"), x.abs().amax().reshape(1))
    assert torch.equal(measured(x, "percentile", percentile=70.0), quant.calibrate(x, "percentile", percentile=70.0))


def test_the_first_tensor_that_cannot_be_measured_is_named():
    calibration, sound = Calibration(backend("cpu")), torch.randn(5, 8)
    bad = sound.clone()
    bad[2, 3:5] = float("nan")
    for name, x in {"good": sound, "first": bad, "second": bad / 0.0}.items():
        calibration.measure(name, x, torch.empty(1), "mse", 8)
    with pytest.raises(ValueError, match="^first: cannot calibrate on a tensor in which 2 of 40 values are NaN or inf"):
        calibration.finish()
    calibration.finish()  # nothing since


@pytest.mark.parametrize("method", ["mse", "absmax"])
def test_an_empty_tensor_is_refused_at_once(method):
    with pytest.raises(ValueError, match=r"^x: cannot calibrate on an empty tensor \(shape \[0, 8\]\)"):
        measured(torch.empty(0, 8), method)
