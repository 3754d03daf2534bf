"""What holds of adam on every device: cases for `compare`, a function like tests.ops.compare.compare."""

import math

import torch

from lsq.ops import adam
from lsq.quant import quantize

RATE, BETAS, EPSILON = 3e-3, (0.9, 0.999), 1e-3
SHAPES = [((16, 48), None), ((48, 144), None), ((33, 144), 48)]
"""Shape of a weight, rows of its codes."""


def state(*shape):
    """(weight, gradient, first moment, second moment) in the middle of a training."""
    return torch.randn(shape), torch.randn(shape), 0.1 * torch.randn(shape), 0.1 * torch.rand(shape)


def numbers(**changes):
    return adam.scalars(RATE, BETAS, EPSILON, **{"step": 3, "weight_decay": 0.1, "factor": 0.5, **changes})


def check_codes(compare, bits: int, per_channel: bool, shape: tuple[int, int], rows: int | None) -> None:
    """Codes, transposed codes and scales are those of the new weight."""
    clip = 0.5 + torch.rand(shape[0] if per_channel else 1)
    weight, _, _, codes, transposed, scale = compare("adam", *state(*shape), numbers(), clip, bits=bits, rows=rows)
    wanted = quantize(weight, clip, bits)
    assert torch.equal(codes[: shape[0]], wanted.codes) and torch.equal(transposed, codes.t())
    assert torch.equal(scale[: shape[0]], wanted.scale.expand(shape[0]))
    assert not codes[shape[0] :].any() and (scale[shape[0] :] == 1).all()


def check_no_transposed_codes(compare) -> None:
    *_, transposed, _ = compare("adam", *state(33, 48), numbers(), torch.ones(33), transposed=False)
    assert transposed is None


def check_gradient_that_is_not_finite(compare, clips: int) -> None:
    """It shows in the weight and in the scales."""
    weight, gradient, first, second = state(48, 144)
    gradient[3, 2], gradient[40, 143], gradient[41, 0] = math.nan, math.inf, -math.inf
    weight, *_, scale = compare("adam", weight, gradient, first, second, numbers(), torch.ones(clips))
    assert weight.isnan().nonzero().tolist() == [[3, 2], [40, 143], [41, 0]]
    assert scale.isnan().nonzero().flatten().tolist() == ([3, 40, 41] if clips == 48 else list(range(48)))


def check_factor_that_is_not_finite(compare, factor: float) -> None:
    weight, *_, scale = compare("adam", *state(16, 48), numbers(factor=factor), torch.ones(16))
    assert weight.isnan().all() and scale.isnan().all()
    weight, *_ = compare("adam", *state(7), numbers(factor=factor), None)
    assert weight.isnan().all()


def check_infinity_times_zero(compare) -> None:
    """An infinite gradient is not hidden by a factor of zero."""
    weight, gradient, first, second = state(7)
    gradient[3] = math.inf
    weight, *_ = compare("adam", weight, gradient, first, second, numbers(factor=0.0), None)
    assert weight.isnan().nonzero().tolist() == [[3]]
