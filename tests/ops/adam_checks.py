"""What holds of Adam on every device: cases for `compare`, a function like
tests.ops.compare.compare."""

import math

import torch

from lsq.ops import adam
from lsq.ops.adam import Adam
from lsq.program.values import Weight
from lsq.quant import Grain, WeightFormat, quantize
from tests.ops.compare import empty

RATE, BETAS, EPSILON = 3e-3, (0.9, 0.999), 1e-3
SHAPES = [((16, 48), None), ((48, 144), None), ((33, 144), 48)]
"""Shape of a weight, rows of its codes."""


def state(*shape):
    """(weight, gradient, first moment, second moment) in the middle of a training."""
    return torch.randn(shape), torch.randn(shape), 0.1 * torch.randn(shape), 0.1 * torch.rand(shape)


def numbers(**changes):
    return adam.scalars(RATE, BETAS, EPSILON, **{"step": 3, "weight_decay": 0.1, **changes})


def step(
    before,
    now,
    rounded: Weight | None = None,
    transposed: bool = False,
    factor: float = 0.5,
    limit: float = 0.0,
) -> Adam:
    """A step from `before`, see `state`, under the numbers `now`."""
    weight, gradient, first, second = before
    if transposed:
        rounded.transposed = empty(*rounded.codes.shape[::-1], dtype=torch.int8)
    return Adam(
        weight=weight,
        gradient=gradient,
        first=first,
        second=second,
        numbers=now,
        gradient_factor=torch.tensor([factor]),
        limit=limit,
        new_weight=empty(*weight.shape),
        new_first=empty(*weight.shape),
        new_second=empty(*weight.shape),
        rounded=rounded,
    )


def codes_of(
    clip: torch.Tensor, shape: tuple[int, int], rows: int | None = None, bits: int = 8
) -> Weight:
    """Codes of a weight that the step is to write."""
    rows = rows or shape[0]
    return Weight(
        format=WeightFormat(
            name="weight", bits=bits, grain=Grain.ROW if len(clip) > 1 else Grain.TENSOR
        ),
        clip=clip,
        codes=empty(rows, shape[1], dtype=torch.int8),
        scale=empty(rows),
    )


def check_codes(
    compare, bits: int, per_channel: bool, shape: tuple[int, int], rows: int | None
) -> None:
    """Codes, transposed codes and scales are those of the new weight."""
    clip = 0.5 + torch.rand(shape[0] if per_channel else 1)
    done = compare(
        step(state(*shape), numbers(), codes_of(clip, shape, rows, bits), transposed=True)
    )
    wanted = quantize(done.new_weight, clip, bits)
    codes, scale = done.rounded.codes, done.rounded.scale
    assert torch.equal(codes[: shape[0]], wanted.codes) and torch.equal(
        done.rounded.transposed, codes.t()
    )
    assert torch.equal(scale[: shape[0]], wanted.scale.expand(shape[0]))
    assert not codes[shape[0] :].any() and (scale[shape[0] :] == 1).all()


def check_largest_clips(compare, shape: tuple[int, int], rows: int | None) -> None:
    """The clip of a row is its largest new magnitude; that of a row of zeros stays, or becomes
    1."""
    before = state(*shape)
    for tensor in before:
        tensor[1] = 0.0
        tensor[2] = 0.0
    clip = 0.5 + torch.rand(shape[0])
    clip[2] = math.nan
    done = compare(
        with_new_clip(step(before, numbers(), codes_of(clip, shape, rows), transposed=True))
    )
    wanted = done.new_weight.abs().amax(1)
    wanted[1], wanted[2] = clip[1], 1.0
    assert torch.equal(done.new_clip, wanted)
    codes = quantize(done.new_weight, wanted, 8).codes
    assert torch.equal(done.rounded.codes[: shape[0]], codes)
    assert torch.equal(done.rounded.transposed, done.rounded.codes.t())


def with_new_clip(operation: Adam) -> Adam:
    """The same, whose rows are rounded under their largest magnitudes."""
    operation.new_clip = empty(len(operation.rounded.clip))
    return operation


def check_no_transposed_codes(compare) -> None:
    done = compare(step(state(33, 48), numbers(), codes_of(torch.ones(33), (33, 48))))
    assert done.rounded.transposed is None and done.rounded.codes.any()


def check_gradient_that_is_not_finite(compare, clips: int) -> None:
    """It shows in the weight and in the scales."""
    before = state(48, 144)
    before[1][3, 2], before[1][40, 143], before[1][41, 0] = math.nan, math.inf, -math.inf
    done = compare(step(before, numbers(), codes_of(torch.ones(clips), (48, 144))))
    assert done.new_weight.isnan().nonzero().tolist() == [[3, 2], [40, 143], [41, 0]]
    assert done.rounded.scale.isnan().nonzero().flatten().tolist() == (
        [3, 40, 41] if clips == 48 else list(range(48))
    )


def check_factor_that_is_not_finite(compare, factor: float) -> None:
    done = compare(
        step(state(16, 48), numbers(), codes_of(torch.ones(16), (16, 48)), factor=factor)
    )
    assert done.new_weight.isnan().all() and done.rounded.scale.isnan().all()
    assert compare(step(state(7), numbers(), factor=factor)).new_weight.isnan().all()


def check_infinity_times_zero(compare) -> None:
    """An infinite gradient is not hidden by a factor of zero."""
    before = state(7)
    before[1][3] = math.inf
    assert compare(step(before, numbers(), factor=0.0)).new_weight.isnan().nonzero().tolist() == [
        [3]
    ]


def in_place(operation: Adam) -> Adam:
    """The same, where the new weight and moments take the place of the old ones."""
    changed = operation.bind(lambda tensor: tensor)
    changed.new_weight, changed.new_first, changed.new_second = (
        changed.weight,
        changed.first,
        changed.second,
    )
    return changed
