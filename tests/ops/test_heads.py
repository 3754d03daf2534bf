"""split_heads and merge_heads: layout, scaling, rounding, and gradients that undo them."""

import math

import pytest
import torch

from lsq.ops.rounding import round_activation
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, compare, compare_program, fused
from tests.ops.operands import KINDS, clipped_bits, product_of

HEADS, WIDTH = 3, 16


@pytest.mark.parametrize("batch, time", [(1, 1), (7, 1), (1, 41), (11, 31)])
@pytest.mark.parametrize("options", [{}, {"clip_gradient": "lsq"}, {"backward": "int8"}, {"mode": "float"}])
def test_in_programs(batch, time, options):
    config = config_of(**options)
    names = {"split_heads", "split_heads_backward", "merge_heads", "merge_heads_backward"}
    assert names <= compare_program(layers.self_attention(config, batch, time, False, True, True, True))
    assert names <= compare_program(layers.cross_attention(config, batch, time, 5, False, True, True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 7), (41, 1)])
def test_split(kind, parts, batch, time):
    y, scale = product_of(kind, batch * time, parts * HEADS * WIDTH)
    bias = torch.randn(parts * HEADS * WIDTH)
    factors = (0.25, 1.0, 1.0)[:parts]
    found = compare("split_heads", y, scale, bias, batch=batch, heads=HEADS, parts=parts, factor=0.25, bits=8)
    values = ((y if scale is None else y * scale) + bias).view(time, batch, parts, HEADS, WIDTH)
    for part, (tensor, factor) in enumerate(zip(found, factors, strict=True)):
        assert torch.equal(tensor, values[:, :, part].permute(1, 2, 0, 3) * factor)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_gradient_of_split_is_its_inverse(parts):
    shape = (3, HEADS, 7, WIDTH)
    gradients = [torch.randn(shape) for _ in range(parts)]
    dy, row_scale, dclip, dbias = compare(
        "split_heads_backward", *gradients, *(None,) * 6, batch=3, heads=HEADS, parts=parts, factor=0.5, bits=8
    )
    assert row_scale is None and dclip is None
    parted = dy.view(7, 3, parts, HEADS, WIDTH)
    for part, gradient in enumerate(gradients):
        assert torch.equal(parted[:, :, part].permute(1, 2, 0, 3), gradient * (0.5 if part == 0 else 1.0))
    torch.testing.assert_close(dbias, dy.sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_gradient_of_split_under_a_clip(rounded, error):
    columns = 3 * HEADS * WIDTH
    y, scale = product_of("int8", 41, columns)
    gradients = [torch.randn(1, HEADS, 41, WIDTH) for _ in range(3)]
    options = {"gradient_stream": 5} if rounded else {}
    dy, row_scale, dclip, _ = compare(
        "split_heads_backward", *gradients, y, scale, clipped_bits(y),
        torch.rand(41, columns) if error else None, torch.rand(columns) if rounded else None, KEY,
        batch=1, heads=HEADS, parts=3, factor=0.25, bits=8, **options,
    )
    assert dy.dtype == (torch.int8 if rounded else torch.float32)
    assert dclip.shape == (1,) and (row_scale is not None) == rounded


@pytest.mark.parametrize("batch, time", [(1, 1), (3, 7), (41, 1), (11, 31)])
@pytest.mark.parametrize("bits", [8, 4])
def test_merge_rounds_like_any_activation(batch, time, bits):
    context, clip = torch.randn(batch, HEADS, time, WIDTH), torch.tensor([1.4])
    codes, scale, clipped, error = compare("merge_heads", context, clip, bits=bits, error=True)
    rows = context.permute(2, 0, 1, 3).reshape(time * batch, -1)
    for found, wanted in zip(
        (codes, scale, clipped, error), round_activation(rows, clip, bits=bits, error=True), strict=True
    ):
        assert torch.equal(found, wanted)


def test_merge_without_a_clip_undoes_split():
    context = torch.randn(3, HEADS, 7, WIDTH)
    rows, scale, clipped, error = compare("merge_heads", context, None, bits=8)
    assert scale is clipped is error is None
    (again,) = compare("merge_heads_backward", rows, batch=3, heads=HEADS)
    assert torch.equal(again, context)


def test_merge_carries_nan():
    context = torch.randn(3, HEADS, 7, WIDTH)
    context[1, 2, 3, 4] = math.nan
    _, scale, _, _ = fused("merge_heads", context, torch.tensor([1.0]), bits=8)
    assert scale.isnan()
