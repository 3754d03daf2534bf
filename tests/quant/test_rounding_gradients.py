"""The gradients of quantisation against finite differences."""

import math

import pytest
import torch

from tests.quant.fake import fake_quantize

INFINITY = math.inf
NAN = math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(bits, clip_gradient, rows, shape=(7, 41)):
    """float64 x, clip, upstream g and the two gradients of sum(g * x_hat)."""
    random = generator(bits)
    x = torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()
    clip = (torch.rand(rows, dtype=torch.float64, generator=random) + 0.5).requires_grad_()
    g = torch.randn(shape, dtype=torch.float64, generator=random)
    (fake_quantize(x, clip, bits, clip_gradient) * g).sum().backward()
    return x.detach(), clip.detach(), g, x.grad, clip.grad


def slope(function, clip, step=1e-6):
    """Central differences of function: clip -> [rows], each row depending on its own clip only."""
    return (function(clip + step) - function(clip - step)) / (2 * step)


def sum_per_clip(values, rows):
    return values.reshape(rows, -1).sum(1)


@pytest.mark.parametrize("bits", (2, 5, 8))
@pytest.mark.parametrize("rows", (1, 7))
def test_pact_gradient_is_that_of_clamping(bits, rows):
    """Rounding counts as the identity, so the loss to differentiate is sum(g * clamp(x, -c, c))."""
    x, clip, g, x_gradient, clip_gradient = gradients(bits, "pact", rows)

    def clamped(c):
        return sum_per_clip(g * x.clamp(-c.view(-1, 1), c.view(-1, 1)), rows)

    torch.testing.assert_close(clip_gradient, slope(clamped, clip), rtol=1e-7, atol=1e-8)
    assert torch.equal(x_gradient, g * (x.abs() <= clip.view(-1, 1)))


@pytest.mark.parametrize("bits", (2, 5, 8))
@pytest.mark.parametrize("rows", (1, 7))
def test_lsq_gradient_holds_the_rounding_error_constant(bits, rows):
    """x_hat = s * (x/s + offset) with offset = rint(x/s) - x/s frozen, and -+c outside."""
    x, clip, g, x_gradient, clip_gradient = gradients(bits, "lsq", rows)
    maximum = 2 ** (bits - 1) - 1
    ratio = x / (clip.view(-1, 1) / maximum)
    offset = ratio.round() - ratio
    outside = ratio.abs() > maximum

    def held(c):
        inside = c.view(-1, 1) / maximum * offset + x
        return sum_per_clip(g * torch.where(outside, x.sign() * c.view(-1, 1), inside), rows)

    expected = slope(held, clip) / math.sqrt(7 * 41 / rows * maximum)
    torch.testing.assert_close(clip_gradient, expected, rtol=1e-7, atol=1e-8)
    assert torch.equal(x_gradient, g * ~outside)


def test_gradients_on_the_boundary():
    """|x| = c counts as inside: the gradient goes to x, not to the clip."""
    x = torch.tensor([1.0, -1.0, 1.5, -1.5], requires_grad=True)
    clip = torch.tensor([1.0], requires_grad=True)
    fake_quantize(x, clip).backward(torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    assert x.grad.tolist() == [1.0, 10.0, 0.0, 0.0]
    assert clip.grad.tolist() == [100.0 - 1000.0]


@pytest.mark.parametrize("clip_gradient", ("pact", "lsq"))
def test_nan_reaches_x_hat_and_both_gradients(clip_gradient):
    x = torch.tensor([1.0, NAN, INFINITY, -INFINITY], requires_grad=True)
    clip = torch.tensor([2.0], requires_grad=True)
    x_hat = fake_quantize(x, clip, 8, clip_gradient)
    assert torch.isnan(x_hat).tolist() == [False, True, False, False]
    assert x_hat[2:].tolist() == [2.0, -2.0]
    (x_hat**2).sum().backward()
    assert torch.isnan(x.grad).tolist() == [False, True, False, False]
    assert torch.isnan(clip.grad).all()
