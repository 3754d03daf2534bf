"""The functions on gradient messages: they write what the operations compute; a two-hop sum; what is refused."""

import pytest
import torch

from lsq.ops import gradient_codec, registry
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.registry import definition
from tests.ops.compare import KEY
from tests.ops.operands import DTYPES


def messages_for(layout: MessageLayout, *copies: int) -> torch.Tensor:
    return torch.full((*copies, layout.shards, layout.message_bytes), 85, dtype=torch.uint8)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_functions_compute_the_operations(bits, dtype, built, monkeypatch):
    if not built:
        monkeypatch.setattr(registry, "fused_available", lambda: False)
    layout = MessageLayout.for_values(1000, 3, bits=bits)
    x, options = torch.randn(1000).to(dtype), {"key": KEY, "stochastic": True, "stream": 4}
    messages, error = messages_for(layout), torch.full((1000,), 85.0)
    gradient_codec.pack(x, layout, out=messages, error=error, **options)
    wanted = definition("gradient_pack").reference(
        x[None], KEY, shards=3, length=layout.length, bits=bits, stochastic=True, stream=4, error=True
    )
    assert torch.equal(messages, wanted[0]) and torch.equal(error, wanted[1])

    eight = MessageLayout.of_shard(layout.length)
    total = torch.full((eight.message_bytes,), 85, dtype=torch.uint8)
    gradient_codec.sum_messages(messages, layout, out=total, out_layout=eight, factor=0.5, **options)
    (wanted,) = definition("gradient_sum").reference(
        messages, KEY, length=layout.length, bits=bits, factor=0.5, stochastic=True, stream=4
    )
    assert torch.equal(total, wanted)

    back = torch.full_like(x, 85)
    gradient_codec.unpack(messages, layout, out=back, factor=3.0)
    (wanted,) = definition("gradient_unpack").reference(
        messages[None], values=1000, length=layout.length, bits=bits, factor=3.0, dtype=dtype
    )
    assert torch.equal(back, wanted)


def test_two_hops_are_close_to_the_mean():
    """What eight processes do: pack, exchange shards, sum, exchange sums, unpack."""
    world = 8
    layout = MessageLayout.for_values(5003, world)
    gradients = torch.randn(world, 5003)
    sent = messages_for(layout, world)
    for rank in range(world):
        gradient_codec.pack(gradients[rank], layout, out=sent[rank])
    sums = messages_for(layout)
    for shard in range(world):
        gradient_codec.sum_messages(sent[:, shard].contiguous(), layout, out=sums[shard], factor=1 / world)
    found = torch.empty(5003)
    gradient_codec.unpack(sums, layout, out=found)
    mean = gradients.mean(0)
    assert (found - mean).norm() / mean.norm() < 0.015


def test_rows_and_copies_are_added_up():
    layout = MessageLayout.for_values(1000, 2)
    x = torch.randn(3, 1000)
    messages, whole = messages_for(layout), messages_for(layout)
    gradient_codec.pack(x, layout, out=messages)
    gradient_codec.pack(x[0] + x[1] + x[2], layout, out=whole)
    assert torch.equal(messages, whole)
    once, twice = torch.empty(1000), torch.empty(1000)
    gradient_codec.unpack(messages, layout, out=once)
    gradient_codec.unpack(torch.stack([messages, messages]), layout, out=twice)
    assert torch.equal(twice, 2 * once)


LAYOUT = MessageLayout.for_values(1000, 2)


@pytest.mark.parametrize("call, said", [
    (lambda: gradient_codec.pack(torch.zeros(999), LAYOUT, out=messages_for(LAYOUT)), r"\[999\]; the layout wants"),
    (lambda: gradient_codec.pack(torch.zeros(1000), LAYOUT, out=messages_for(LAYOUT)[0]), "out is torch.uint8"),
    (lambda: gradient_codec.pack(torch.zeros(2000)[::2], LAYOUT, out=messages_for(LAYOUT)), "not contiguous"),
    (lambda: gradient_codec.pack(
        torch.zeros(1000), LAYOUT, out=messages_for(LAYOUT), error=torch.zeros(1000).half()), "error is torch.float16"),
    (lambda: gradient_codec.pack(
        torch.zeros(1000), LAYOUT, out=torch.zeros(2, LAYOUT.message_bytes, dtype=torch.uint8, device="meta")),
     "out lies on meta"),
    (lambda: gradient_codec.sum_messages(
        messages_for(LAYOUT), LAYOUT, out=messages_for(LAYOUT)[0], out_layout=MessageLayout.of_shard(512, block=32)),
     "only the bits may differ"),
    (lambda: gradient_codec.unpack(messages_for(LAYOUT)[:1], LAYOUT, out=torch.zeros(1000)), "messages to unpack"),
    (lambda: gradient_codec.unpack(messages_for(LAYOUT), LAYOUT, out=torch.zeros(999)), r"it must be .* \[1000\]"),
])
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
