"""The C++ search for the clip of least error against lsq.quant's, on the same values."""

import pytest
import torch

from lsq import quant
from lsq.ops import calibration
from tests.quant.fake import fake_quantize


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
    found = calibration.least_error_clip(x, bits, per_channel)
    expected = quant.octav_clip(x, bits, per_channel)
    assert found.shape == expected.shape == (7 if per_channel else 1,) and found.dtype == torch.float32
    assert (error(x, found, bits) <= error(x, expected, bits) * 1.001).all()


def test_sample_of_a_long_tensor():
    x = torch.randn(1200, 1024)
    found, expected = calibration.least_error_clip(x, 8), quant.octav_clip(x)
    assert (error(x, found, 8) <= error(x, expected, 8) * 1.001).all()


def test_zeros_and_single_values():
    x = torch.tensor([[0.0, 0.0], [0.0, -3.0], [2.0, 2.0]])
    found = calibration.least_error_clip(x, 8, True)
    assert found[0] == quant.SMALLEST_CLIP
    torch.testing.assert_close(found[1:], torch.tensor([3.0, 2.0]), rtol=2e-3, atol=0.0)


def test_other_methods_and_errors_are_the_quantisers():
    x = torch.randn(41, 16)
    torch.testing.assert_close(calibration.calibrate(x, "absmax", 8), x.abs().amax().reshape(1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        calibration.calibrate(x / 0.0, "mse", 8)
