"""read_product, its gradient, and append_time."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.program import layers
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, compare, compare_program
from tests.ops.operands import KINDS, ROWS, clipped_bits, product_of


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"backward": "int8"}, {"mode": "float"}])
def test_in_programs(rows, bias, options):
    names = {"read_product", "read_product_backward"}
    assert names <= compare_program(layers.linear(QuantConfig(**options), rows, 48, 32, bias, True, True))
    assert names <= compare_program(layers.self_attention(config_of(**options), 1, rows, False, False, True, True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 7, 48, 1040])
@pytest.mark.parametrize("biased", [False, True])
def test_values(kind, columns, biased):
    y, scale = product_of(kind, 41, columns)
    bias = torch.randn(columns) if biased else None
    (found,) = compare("read_product", y, scale, bias, bits=8)
    expected = y.float() if scale is None else y.float() * scale
    assert torch.equal(found, expected + bias if biased else expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("with_clip", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_gradients(rows, rounded, with_clip, error):
    gradient = torch.randn(rows, 48)
    y = product_of("int8", rows, 48)[0] if with_clip else None
    dy, row_scale, dclip, dbias = compare(
        "read_product_backward", gradient, y, clipped_bits(y) if with_clip else None,
        torch.rand(rows, 48) if error and with_clip else None, torch.rand(48) if rounded else None, KEY,
        bits=8, bias=True, **({"gradient_stream": 4} if rounded else {}),
    )
    torch.testing.assert_close(dbias, gradient.sum(0), atol=1e-4, rtol=1e-5)
    assert (dclip is not None) == with_clip and (row_scale is not None) == rounded
    if not rounded and not with_clip:
        assert torch.equal(dy, gradient)


@pytest.mark.parametrize("past", [0, 1, 6])
def test_append_time(past):
    before, now = torch.randn(3, 2, past, 16), torch.randn(3, 2, 1, 16)
    (found,) = compare("append_time", before, now)
    assert torch.equal(found, torch.cat([before, now], dim=2))


@pytest.mark.parametrize("past", [0, 5])
def test_in_a_step_of_decoding(past):
    seen = compare_program(layers.decoder_step(config_of(), 3, past, 9, True))
    assert {"append_time", "attention", "split_heads"} <= seen
