"""adam against torch.optim and fairseq over several steps, and its codes against the quantiser."""

import math

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.ops import adam
from lsq.quant import quantize
from tests.ops.compare import compare, fused

RATE, BETAS, EPSILON = 3e-3, (0.9, 0.999), 1e-3


def state(*shape):
    """(weight, gradient, first moment, second moment) in the middle of a training."""
    return torch.randn(shape), torch.randn(shape), 0.1 * torch.randn(shape), 0.1 * torch.rand(shape)


def numbers(**changes):
    return adam.scalars(RATE, BETAS, EPSILON, **{"step": 3, "weight_decay": 0.1, "factor": 0.5, **changes})


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("like", ["fairseq", "torch"])
def test_steps_equal_those_of_other_libraries(like, decay):
    weight = torch.randn(33, 16)
    theirs = torch.nn.Parameter(weight.clone())
    options = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": decay}
    if like == "fairseq":
        optimizer = FairseqAdam([theirs], **options)
    else:
        optimizer = (torch.optim.AdamW if decay else torch.optim.Adam)([theirs], **options)
    first = second = torch.zeros_like(weight)
    for step in range(1, 21):
        gradient = torch.randn(33, 16)
        theirs.grad = gradient.clone()
        optimizer.step()
        now = adam.scalars(
            RATE, BETAS, EPSILON, step, weight_decay=decay, factor=2.0**-7, torch_epsilon=like == "torch"
        )
        weight, first, second, *_ = fused("adam", weight, gradient * 2**7, first, second, now, None)
    torch.testing.assert_close(weight, theirs.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (1023,), (1025,), (2049,), (7, 5), (0,)])
def test_parameters_without_codes(shape):
    *_, codes, transposed, scale = compare("adam", *state(*shape), numbers(), None)
    assert codes is transposed is scale is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape, rows", [((16, 48), None), ((48, 144), None), ((33, 144), 48)])
def test_codes_are_those_of_the_new_weight(bits, per_channel, shape, rows):
    clip = 0.5 + torch.rand(shape[0] if per_channel else 1)
    weight, _, _, codes, transposed, scale = compare("adam", *state(*shape), numbers(), clip, bits=bits, rows=rows)
    wanted = quantize(weight, clip, bits)
    assert torch.equal(codes[: shape[0]], wanted.codes) and torch.equal(transposed, codes.t())
    assert torch.equal(scale[: shape[0]], wanted.scale.expand(shape[0]))
    assert not codes[shape[0] :].any() and (scale[shape[0] :] == 1).all()


def test_without_transposed_codes():
    *_, transposed, _ = compare("adam", *state(33, 48), numbers(), torch.ones(33), transposed=False)
    assert transposed is None


@pytest.mark.parametrize("clips", [1, 48])
def test_a_gradient_that_is_not_finite_shows(clips):
    weight, gradient, first, second = state(48, 144)
    gradient[3, 2], gradient[40, 143], gradient[41, 0] = math.nan, math.inf, -math.inf
    weight, *_, scale = compare("adam", weight, gradient, first, second, numbers(), torch.ones(clips))
    assert weight.isnan().nonzero().tolist() == [[3, 2], [40, 143], [41, 0]]
    assert scale.isnan().nonzero().flatten().tolist() == ([3, 40, 41] if clips == 48 else list(range(48)))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_shows(factor):
    weight, *_, scale = compare("adam", *state(16, 48), numbers(factor=factor), torch.ones(16))
    assert weight.isnan().all() and scale.isnan().all()
    weight, *_ = compare("adam", *state(7), numbers(factor=factor), None)
    assert weight.isnan().all()


def test_an_infinite_gradient_is_not_hidden_by_a_factor_of_zero():
    weight, gradient, first, second = state(7)
    gradient[3] = math.inf
    weight, *_ = compare("adam", weight, gradient, first, second, numbers(factor=0.0), None)
    assert weight.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("shape", [(5,), (48, 48)])
def test_in_place(shape):
    inputs = *state(*shape), numbers(), torch.ones(48) if len(shape) > 1 else None
    expected = fused("adam", *inputs)
    codes = [None if wanted is None else torch.empty_like(wanted) for wanted in expected[3:]]
    outputs = [inputs[0], *inputs[2:4], *codes]
    adam.cpu(*inputs, *outputs, *(torch.empty(shape) for _ in range(2)))
    for found, wanted in zip(outputs, expected, strict=True):
        assert found is wanted is None or torch.equal(found, wanted)
