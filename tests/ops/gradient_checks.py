"""Gradients, operations on their messages, and comparisons of these bit by bit."""

import torch

from lsq.ops.gradient_messages import (
    MessageLayout,
    Messages,
    PackGradients,
    SumMessages,
    UnpackGradients,
)
from lsq.program.operation import Operation
from tests.ops.compare import empty, on_reference, written


def gradients(rows: int, values: int, dtype=torch.float32) -> torch.Tensor:
    """Float [R, v] of magnitudes from 1e-6 to 1, different from run to run of 32."""
    magnitudes = 10.0 ** (-6 * torch.rand(-(-values // 32))).repeat_interleave(32)[:values]
    return (torch.randn(rows, values) * magnitudes).to(dtype)


def pack(x: torch.Tensor, layout: MessageLayout) -> PackGradients:
    """The packing of x [R, v]."""
    return PackGradients(x=x, messages=to_write(layout, layout.shards))


def add_up(data: torch.Tensor, layout: MessageLayout, *, factor: float = 1.0) -> SumMessages:
    """The sum of messages [N, M] of one shard."""
    out = MessageLayout.for_values(layout.length, 1, block=layout.block)
    return SumMessages(
        messages=Messages(layout=layout, data=data), factor=factor, sum=to_write(out)
    )


def unpack(
    data: torch.Tensor, layout: MessageLayout, *, factor: float = 1.0, dtype=torch.float32
) -> UnpackGradients:
    """The values of messages [R, S, M]."""
    return UnpackGradients(
        messages=Messages(layout=layout, data=data),
        factor=factor,
        x=empty(layout.values, dtype=dtype),
    )


def to_write(layout: MessageLayout, *copies: int) -> Messages:
    """Messages that an operation is to write."""
    return Messages(layout=layout, data=empty(*copies, layout.message_bytes, dtype=torch.uint8))


def packed(values: int, copies: int = 1, *, shards: int = 1, block: int = 128, rows: int = 1):
    """(layout, messages uint8 [copies, S, M])."""
    layout = MessageLayout.for_values(values, shards, block=block)
    made = [
        on_reference(pack(gradients(rows, values), layout)).messages.data for _ in range(copies)
    ]
    return layout, torch.stack(made)


def assert_same_bits(found: Operation, expected: Operation) -> None:
    """Equal bits in what was written; any NaN for NaN."""
    wanted_of = written(expected)
    for name, output in written(found).items():
        if output is not None:
            assert_same_tensor(output, wanted_of[name], f"{found.name}: {name}")


def assert_same_tensor(output: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    assert output.dtype == wanted.dtype and output.shape == wanted.shape, what
    if wanted.dtype.is_floating_point:
        assert torch.equal(output.isnan(), wanted.isnan()), what
        output, wanted = output.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0)
    differs = (output.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()
    assert not differs.numel(), (what, differs[:5].tolist())
