"""Adam against torch.optim and fairseq over several steps, and its codes against the quantiser."""

import math

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.ops import adam
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops import adam_checks
from tests.ops.adam_checks import BETAS, EPSILON, RATE, codes_of, in_place, numbers, state, step
from tests.ops.compare import compare, on_cpu, written


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
    for number in range(1, 21):
        gradient = torch.randn(33, 16)
        theirs.grad = gradient.clone()
        optimizer.step()
        now = adam.scalars(
            RATE, BETAS, EPSILON, number, weight_decay=decay, torch_epsilon=like == "torch"
        )
        done = on_cpu(step((weight, gradient * 2**7, first, second), now, factor=2.0**-7))
        weight, first, second = done.new_weight, done.new_first, done.new_second
    torch.testing.assert_close(weight, theirs.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (1023,), (4099,), (7, 5), (0,)])
def test_parameters_without_codes(shape):
    assert compare(step(state(*shape), numbers())).rounded is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape, rows", adam_checks.SHAPES)
def test_codes_are_those_of_the_new_weight(bits, per_channel, shape, rows):
    adam_checks.check_codes(compare, bits, per_channel, shape, rows)


@pytest.mark.parametrize("shape, rows", adam_checks.SHAPES)
def test_rows_under_their_largest_magnitudes(shape, rows):
    adam_checks.check_largest_clips(compare, shape, rows)


def test_without_transposed_codes():
    adam_checks.check_no_transposed_codes(compare)


@pytest.mark.parametrize("clips", [1, 48])
def test_a_gradient_that_is_not_finite_shows(clips):
    adam_checks.check_gradient_that_is_not_finite(compare, clips)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_shows(factor):
    adam_checks.check_factor_that_is_not_finite(compare, factor)


def test_an_infinite_gradient_is_not_hidden_by_a_factor_of_zero():
    adam_checks.check_infinity_times_zero(compare)


@pytest.mark.parametrize("shape", [(5,), (48, 48)])
def test_in_place(shape):
    operation = step(
        state(*shape), numbers(), codes_of(torch.ones(48), shape) if len(shape) > 1 else None
    )
    expected = written(on_cpu(operation))
    for name, found in written(on_cpu(in_place(operation))).items():
        assert found is expected[name] is None or torch.equal(found, expected[name])


def test_packed_formats_of_weights_are_refused():
    rounded = codes_of(torch.ones(48), (48, 48))
    rounded = Weight(
        format=WEIGHT_FORMATS["int4"](8, Grain.ROW), codes=rounded.codes, scale=rounded.scale
    )
    with pytest.raises(
        ValueError, match="the format int4 are packed; leave out `rounded`, and round"
    ):
        step(state(48, 48), numbers(), rounded)
