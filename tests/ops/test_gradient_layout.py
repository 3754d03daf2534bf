"""Layouts of gradient messages: sizes, views, and what is refused."""

import pytest
import torch

from lsq.ops.gradient_layout import BLOCKS, MessageLayout


@pytest.mark.parametrize(
    "values, shards, length",
    [
        (1, 1, 32),
        (32, 1, 32),
        (33, 1, 64),
        (1, 8, 32),
        (257, 8, 64),
        (1000, 3, 352),
        (25 * 2**18, 8, 819200),
    ],
)
def test_shards_are_the_shortest_that_hold_the_values(values, shards, length):
    layout = MessageLayout.for_values(values, shards)
    assert (layout.values, layout.shards, layout.length) == (values, shards, length)
    assert shards * length >= values


@pytest.mark.parametrize(
    "block, blocks, message_bytes", [(256, 2, 368), (32, 11, 384), (1024, 1, 368)]
)
def test_sizes(block, blocks, message_bytes):
    layout = MessageLayout.for_values(1000, 3, block=block)
    assert (layout.blocks, layout.message_bytes) == (blocks, message_bytes)
    assert MessageLayout.of_shard(352, block=block).message_bytes == message_bytes


@pytest.mark.parametrize("block", BLOCKS)
def test_views_cover_a_message(block):
    layout = MessageLayout.for_values(1000, 3, block=block)
    messages = torch.zeros(2, 3, layout.message_bytes, dtype=torch.uint8)
    layout.codes(messages).fill_(1)
    layout.scales(messages).copy_(torch.tensor(0x0202, dtype=torch.int16).view(torch.bfloat16))
    padding = messages[..., layout.length + 2 * layout.blocks :]
    padding.fill_(3)
    parts = [layout.length, 2 * layout.blocks, padding.shape[-1]]
    expected = torch.cat(
        [torch.full((count,), 1 + number) for number, count in enumerate(parts)]
    ).to(torch.uint8)
    assert torch.equal(messages, expected.expand(2, 3, -1))
    assert parts[-1] < 16 and layout.scales(messages).shape == (2, 3, layout.blocks)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"values": 0, "length": 32}, "values of a message layout is 0"),
        ({"values": 9, "length": 32, "shards": 0}, "shards of a message layout is 0"),
        ({"values": 9, "length": 40}, "length of a shard is 40"),
        ({"values": 9, "length": 32, "block": 48}, "block is 48"),
        (
            {"values": 65, "length": 32, "shards": 2},
            "2 shards of 32 do not hold 65 values; choose a length of at least 33",
        ),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        MessageLayout(**fields)


def test_shards_that_are_refused_for_values():
    with pytest.raises(ValueError, match="shards of a message layout is 0"):
        MessageLayout.for_values(9, 0)
