"""quantize, quantize_weight and add: codes, packed bits, NaN, and every odd length."""

import math

import pytest
import torch

from lsq import quant
from lsq.config import QuantConfig
from lsq.program import layers
from tests.ops.compare import compare, compare_program
from tests.ops.operands import ROWS

CLIP = torch.tensor([1.5])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
def test_in_a_program(rows, clip_gradient):
    quantization = QuantConfig(clip_gradient=clip_gradient)
    assert {"quantize", "quantize_weight"} <= compare_program(
        layers.linear(quantization, rows, 48, 32, True, True, True)
    )


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 2047, 2048, 2049, 6151])
def test_codes_are_exact_at_every_length(bits, numel):
    x = torch.randn(1, numel)
    codes, scale, clipped, error = compare("quantize", x, CLIP, bits=bits, error=True)
    wanted = quant.quantize(x, CLIP, bits)
    assert torch.equal(codes, wanted.codes)
    assert torch.equal(scale, wanted.scale)
    assert torch.equal(clipped, quant.pack_bits(wanted.clipped))
    expected = torch.where(wanted.clipped, 0.0, (codes - x / scale) / quant.maximum_code(bits))
    assert torch.equal(error, expected)


def test_borders_between_codes():
    """Halves go to the even neighbour, and the clip itself is inside."""
    scale = 2.0**-6
    clip = torch.tensor([127 * scale])
    halves = (torch.arange(-128, 128) + 0.5) * scale
    inside = torch.tensor([127.0, -127.0, 0.0, -0.0, 1e-42, -1e-42]) * scale
    beyond = torch.nextafter(clip, torch.tensor([math.inf]))
    x = torch.cat([halves, inside, beyond, -beyond, torch.tensor([math.inf, -math.inf])])[None]
    codes, _, clipped, _ = compare("quantize", x, clip, bits=8)
    expected = torch.cat([torch.arange(-128, 128).add(0.5).round().clamp(-127, 127), torch.tensor(
        [127, -127, 0, 0, 0, 0, 127, -127, 127, -127]
    )])
    assert torch.equal(codes[0], expected.to(torch.int8))
    outside = quant.unpack_bits(clipped, x.numel())
    assert outside.nonzero().flatten().tolist() == [0, 255, 262, 263, 264, 265]


@pytest.mark.parametrize("place", [0, 5, 2048, 4099])
def test_nan_poisons_the_scale(place):
    x = torch.randn(1, 4100)
    x[0, place] = math.nan
    codes, scale, clipped, _ = compare("quantize", x, CLIP, bits=8)
    assert codes[0, place] == 0 and scale.isnan()
    assert not quant.unpack_bits(clipped, 4100)[place]
    assert codes.count_nonzero() > 4000


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("clips", [1, 33])
@pytest.mark.parametrize("rows", [None, 33, 48])
@pytest.mark.parametrize("columns", [1, 17, 48])
def test_weights(bits, clips, rows, columns):
    weight, clip = torch.randn(33, columns), 0.5 + torch.rand(clips)
    codes, scale = compare("quantize_weight", weight, clip, bits=bits, rows=rows)
    wanted = quant.quantize(weight, clip, bits)
    assert torch.equal(codes[:33], wanted.codes)
    assert torch.equal(scale[:33], wanted.scale.expand(33))
    assert codes.shape == (rows or 33, columns)
    assert not codes[33:].any() and (scale[33:] == 1).all()


@pytest.mark.parametrize("clips", [1, 7])
def test_nan_in_a_weight_poisons_what_shares_its_clip(clips):
    weight = torch.randn(7, 16)
    weight[3, 2] = math.nan
    codes, scale = compare("quantize_weight", weight, torch.ones(clips), bits=8, rows=16)
    assert codes[3, 2] == 0
    assert scale.isnan().nonzero().flatten().tolist() == ([3] if clips == 7 else list(range(7)))


def test_add():
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    (total,) = compare("add", a, b)
    assert torch.equal(total, a + b)
