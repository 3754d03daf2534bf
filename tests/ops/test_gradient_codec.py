"""The functions on gradient messages: they write what the operations compute; a two-hop sum; what is refused."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lsq.ops import gradient_codec, registry
from lsq.ops.gradient_codec import KernelCache
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.registry import definition
from tests.ops import cuda
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


@pytest.mark.parametrize("where", ["fused", "reference", "kernels"])
def test_the_error_may_take_the_place_of_the_values(where, monkeypatch, request):
    """As error feedback wants it: what one step leaves, the next one adds its gradients to."""
    if where == "kernels":
        request.getfixturevalue("kernels")
    monkeypatch.setattr(registry, "fused_available", lambda: where == "fused")
    for values in (1000, 1001):
        layout = MessageLayout.for_values(values, 3)
        x, messages = torch.randn(values), messages_for(layout)
        wanted = definition("gradient_pack").reference(x[None], None, shards=3, length=layout.length, error=True)
        gradient_codec.pack(x, layout, out=messages, error=x)
        assert torch.equal(messages, wanted[0]) and torch.equal(x, wanted[1])


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
    (lambda: gradient_codec.pack(torch.zeros(1000).double(), LAYOUT, out=messages_for(LAYOUT)), "are torch.float64"),
    (lambda: gradient_codec.unpack(messages_for(LAYOUT), LAYOUT, out=torch.zeros(1000).int()), "to torch.int32; it"),
    (lambda: gradient_codec.unpack(messages_for(LAYOUT)[:1], LAYOUT, out=torch.zeros(1000)), "messages to unpack"),
    (lambda: gradient_codec.unpack(messages_for(LAYOUT), LAYOUT, out=torch.zeros(999)), r"it must be .* \[1000\]"),
])
def test_what_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.fixture
def kernels(monkeypatch):
    """Makes the functions run kernels in the emulator; the cache that they use, of two lists."""
    cache = gradient_codec.KernelCache(2)

    def run(definition, inputs, outputs, **attributes):
        cache.run(cuda.current_device(), definition, inputs, outputs, attributes)

    monkeypatch.setattr(gradient_codec, "_run", run)
    return cache


def test_launches_are_kept_for_the_same_memory(kernels, monkeypatch):
    made = []
    monkeypatch.setattr(kernels, "_prepared", lambda *inputs: made.append(1) or KernelCache._prepared(kernels, *inputs))
    layout = MessageLayout.for_values(1000, 3)
    x, messages = torch.randn(1000), messages_for(layout)
    for _ in range(3):
        x.normal_()
        gradient_codec.pack(x, layout, out=messages)
        wanted, _ = definition("gradient_pack").reference(x[None], None, shards=3, length=layout.length)
        assert torch.equal(messages, wanted) and len(made) == 1
    back = torch.empty(1000)
    gradient_codec.unpack(messages, layout, out=back)
    gradient_codec.unpack(messages, layout, out=back, factor=2.0)
    assert len(made) == 3 and len(kernels._lists) == 2
    gradient_codec.pack(x, layout, out=messages)  # dropped meanwhile
    assert len(made) == 4 and torch.equal(messages, wanted)


def test_kept_launches_keep_no_tensor(kernels):
    layout = MessageLayout.for_values(64, 1)
    x, messages = torch.randn(64), messages_for(layout)
    gradient_codec.pack(x, layout, out=messages)
    alive = weakref.ref(x)
    del x
    assert alive() is None and len(kernels._lists) == 1


def test_kernels_want_aligned_memory(kernels):
    layout = MessageLayout.for_values(64, 1)
    with pytest.raises(ValueError, match="gradient_pack: a tensor begins 4 bytes after a multiple of 16"):
        gradient_codec.pack(torch.zeros(65)[1:], layout, out=messages_for(layout))


def test_threads_share_the_launches(kernels):
    layout = MessageLayout.for_values(1000, 3)
    x = torch.randn(1000)
    (wanted, _) = definition("gradient_pack").reference(x[None], None, shards=3, length=layout.length)

    def work(_):
        messages = messages_for(layout)
        for _ in range(5):
            gradient_codec.pack(x, layout, out=messages)
        return torch.equal(messages, wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.gpu
def test_functions_on_a_gpu():
    layout = MessageLayout.for_values(5001, 3)
    x = torch.randn(5001)
    messages, on_gpu = messages_for(layout), messages_for(layout).cuda()
    gradient_codec.pack(x, layout, out=messages)
    gradient_codec.pack(x.cuda(), layout, out=on_gpu)
    assert torch.equal(on_gpu.cpu(), messages)
    reference, _ = definition("gradient_pack").reference(x.cuda()[None], None, shards=3, length=layout.length)
    assert torch.equal(reference, on_gpu)
    back = torch.empty(5001)
    found = torch.empty(5001, device="cuda")
    gradient_codec.unpack(messages, layout, out=back, factor=0.3)
    gradient_codec.unpack(on_gpu, layout, out=found, factor=0.3)
    assert torch.equal(found.cpu(), back)
