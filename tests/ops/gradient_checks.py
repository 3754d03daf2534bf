"""Gradients, their messages and what compares them bit by bit, for the tests of every implementation."""

import math

import torch

from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.registry import definition

WORST = [math.nan, math.inf, -math.inf]


def gradients(rows: int, values: int, dtype=torch.float32) -> torch.Tensor:
    """Float [R, v] of magnitudes from 1e-6 to 1, different from run to run of 32."""
    magnitudes = 10.0 ** (-6 * torch.rand(-(-values // 32))).repeat_interleave(32)[:values]
    return (torch.randn(rows, values) * magnitudes).to(dtype)


def packed(values: int, copies: int = 1, *, shards: int = 1, block: int = 128, bits: int = 8, rows: int = 1):
    """(layout, messages uint8 [copies, S, M])."""
    layout = MessageLayout.for_values(values, shards, block=block, bits=bits)
    pack = definition("gradient_pack").reference
    made = [pack(gradients(rows, values), None, **of_pack(layout))[0] for _ in range(copies)]
    return layout, torch.stack(made)


def of_pack(layout: MessageLayout, **more) -> dict:
    """Attributes of gradient_pack."""
    return {
        "shards": layout.shards, "length": layout.length, "bits": layout.bits, "block": layout.block, **more,
    }  # fmt: skip


def of_unpack(layout: MessageLayout, **more) -> dict:
    """Attributes of gradient_unpack."""
    return {"values": layout.values, "length": layout.length, "bits": layout.bits, "block": layout.block, **more}


def assert_same(found, expected) -> None:
    """Equal bits; any NaN for NaN."""
    for number, (output, wanted) in enumerate(zip(found, expected, strict=True)):
        assert (output is None) == (wanted is None), number
        if wanted is None:
            continue
        assert output.dtype == wanted.dtype and output.shape == wanted.shape, number
        if wanted.dtype.is_floating_point:
            assert torch.equal(output.isnan(), wanted.isnan()), number
            output, wanted = output.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0)
        differs = (output.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()
        assert not differs.numel(), (number, differs[:5].tolist())


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a two-byte float [1, v], neighbours side by side."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[None]


def any_scale(values: int) -> tuple[MessageLayout, torch.Tensor]:
    """(layout, messages uint8 [1, 1, M]) whose scales are any bits."""
    layout = MessageLayout.for_values(values, 1, block=32)
    messages = torch.randint(0, 256, (1, 1, layout.message_bytes), dtype=torch.uint8)
    return layout, messages
