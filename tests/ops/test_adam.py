"""Adam against torch.optim and fairseq over several steps; its codes against the quantiser."""

import math

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.ops import adam
from lsq.ops.adam import Adam
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain, WeightFormat, quantize
from tests.ops import cuda
from tests.ops.compare import empty, on_cpu, refused, written
from tests.ops.cuda import compare_cuda

RATE, BETAS, EPSILON = 3e-3, (0.9, 0.999), 1e-3
SHAPES = [((16, 48), None), ((48, 144), None), ((33, 144), 48)]
"""Shape of a weight, rows of its codes."""


def state(*shape):
    """(weight, gradient, first moment, second moment) in the middle of a training."""
    return torch.randn(shape), torch.randn(shape), 0.1 * torch.randn(shape), 0.1 * torch.rand(shape)


def numbers():
    return adam.scalars(RATE, BETAS, EPSILON, 3, weight_decay=0.1)


def step(
    before, now, rounded: Weight | None = None, *, transposed=False, largest=False, factor=0.5
) -> Adam:
    """A step from a `state`; `largest`: rows are rounded under their largest magnitudes."""
    if transposed:
        rounded.transposed = empty(*rounded.codes.shape[::-1], dtype=torch.int8)
    shape = before[0].shape
    return Adam(
        **dict(zip(("weight", "gradient", "first", "second"), before, strict=True)),
        numbers=now,
        gradient_factor=torch.tensor([factor]),
        **{name: empty(*shape) for name in ("new_weight", "new_first", "new_second")},
        rounded=rounded,
        new_clip=empty(len(rounded.clip)) if largest else None,
    )


def codes_of(clip: torch.Tensor, shape: tuple[int, int], rows=None, bits: int = 8) -> Weight:
    """Codes of a weight that the step is to write."""
    rows, grain = rows or shape[0], Grain.ROW if len(clip) > 1 else Grain.TENSOR
    return Weight(
        format=WeightFormat(name="weight", bits=bits, grain=grain),
        clip=clip,
        codes=empty(rows, shape[1], dtype=torch.int8),
        scale=empty(rows),
    )


def in_place(operation: Adam) -> Adam:
    """The same, where the new weight and moments take the place of the old ones."""
    changed = operation.bind(lambda tensor: tensor)
    for name in ("weight", "first", "second"):
        setattr(changed, f"new_{name}", getattr(changed, name))
    return changed


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("like", ["fairseq", "torch"])
def test_steps_equal_those_of_other_libraries(like, decay):
    weight = torch.randn(33, 16)
    theirs = torch.nn.Parameter(weight.clone())
    options = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": decay}
    of_torch = torch.optim.AdamW if decay else torch.optim.Adam
    optimizer = (FairseqAdam if like == "fairseq" else of_torch)([theirs], **options)
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


@pytest.mark.parametrize(
    "shape", [(0,), (1,), (3,), (4,), (1023,), (1025,), (2049,), (4099,), (7, 5)]
)
def test_parameters_without_codes(shape, compared):
    assert compared(step(state(*shape), numbers())).rounded is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape, rows", SHAPES)
def test_codes_are_those_of_the_new_weight(bits, per_channel, shape, rows, compared):
    clip = 0.5 + torch.rand(shape[0] if per_channel else 1)
    codes = codes_of(clip, shape, rows, bits)
    done = compared(step(state(*shape), numbers(), codes, transposed=True))
    wanted, found, valid = quantize(done.new_weight, clip, bits), done.rounded, shape[0]
    assert torch.equal(found.codes[:valid], wanted.codes)
    assert torch.equal(found.transposed, found.codes.t())
    assert torch.equal(found.scale[:valid], wanted.scale.expand(valid))
    assert not found.codes[valid:].any() and (found.scale[valid:] == 1).all()


@pytest.mark.parametrize("shape, rows", SHAPES)
def test_rows_under_their_largest_magnitudes(shape, rows, compared):
    """A row of zeros keeps its clip, or gets 1."""
    before = state(*shape)
    for tensor in before:
        tensor[1:3] = 0.0
    clip = 0.5 + torch.rand(shape[0])
    clip[2] = math.nan
    codes = codes_of(clip, shape, rows)
    done = compared(step(before, numbers(), codes, transposed=True, largest=True))
    wanted = done.new_weight.abs().amax(1)
    wanted[1], wanted[2] = clip[1], 1.0
    assert torch.equal(done.new_clip, wanted)
    codes = quantize(done.new_weight, wanted, 8).codes
    assert torch.equal(done.rounded.codes[: shape[0]], codes)
    assert torch.equal(done.rounded.transposed, done.rounded.codes.t())


def test_without_transposed_codes(compared):
    done = compared(step(state(33, 48), numbers(), codes_of(torch.ones(33), (33, 48))))
    assert done.rounded.transposed is None and done.rounded.codes.any()


@pytest.mark.parametrize("clips", [1, 48])
def test_a_gradient_that_is_not_finite_shows(clips, compared):
    before = state(48, 144)
    before[1][3, 2], before[1][40, 143], before[1][41, 0] = math.nan, math.inf, -math.inf
    done = compared(step(before, numbers(), codes_of(torch.ones(clips), (48, 144))))
    assert done.new_weight.isnan().nonzero().tolist() == [[3, 2], [40, 143], [41, 0]]
    lost = [3, 40, 41] if clips == 48 else list(range(48))
    assert done.rounded.scale.isnan().nonzero().flatten().tolist() == lost


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_shows(factor, compared):
    codes = codes_of(torch.ones(16), (16, 48))
    done = compared(step(state(16, 48), numbers(), codes, factor=factor))
    assert done.new_weight.isnan().all() and done.rounded.scale.isnan().all()
    assert compared(step(state(7), numbers(), factor=factor)).new_weight.isnan().all()


def test_an_infinite_gradient_is_not_hidden_by_a_factor_of_zero(compared):
    before = state(7)
    before[1][3] = math.inf
    found = compared(step(before, numbers(), factor=0.0)).new_weight
    assert found.isnan().nonzero().tolist() == [[3]]


def step_of(shape) -> Adam:
    codes = codes_of(torch.ones(48), shape) if len(shape) > 1 else None
    return step(state(*shape), numbers(), codes)


@pytest.mark.parametrize("shape", [(5,), (48, 48)])
def test_in_place(shape, where):
    operation = step_of(shape)
    expected = written(on_cpu(operation))
    if where == "cpu":
        found, tolerance = written(on_cpu(in_place(operation))), 0.0
    else:
        target = cuda.current_device()
        placed = in_place(operation).bind(
            lambda one: torch.empty(one.shape, dtype=one.dtype, device=target.torch_device)
        )
        for ours, given in zip(placed.inputs, operation.inputs, strict=True):
            ours.copy_(given)
        target.run(in_place(placed).cuda())
        found, tolerance = written(in_place(placed)), 1e-6
    for name, tensor in found.items():
        if tensor is not None:
            allowed = tolerance if tensor.is_floating_point() else tolerance and 1
            torch.testing.assert_close(tensor.cpu(), expected[name], rtol=tolerance, atol=allowed)


def test_packed_formats_of_weights_are_refused():
    rounded = codes_of(torch.ones(48), (48, 48))
    rounded.format = WEIGHT_FORMATS["int4"](8, Grain.ROW)
    with refused("the format int4 are packed; leave out `rounded`, and round"):
        step(state(48, 48), numbers(), rounded)


def test_sizes_that_no_product_takes_are_refused_on_cuda():
    codes = codes_of(torch.ones(33), (33, 48))
    with refused("rows of a weight whose codes are transposed is 33.*multiple of 16"):
        compare_cuda(step(state(33, 48), numbers(), codes, transposed=True))
    with refused("width of a weight is 40"):
        compare_cuda(step(state(16, 40), numbers(), codes_of(torch.ones(16), (16, 40))))
