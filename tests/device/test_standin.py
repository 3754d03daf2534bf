"""The test device itself: what it computes, what it refuses, what it counts."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.device.standin import PLACE, moved, ordered
from tests.device.watch import watched


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(PLACE)


def test_fresh_memory_holds_rubbish_at_aligned_addresses():
    for size in (1, 63, 64, 1000):
        x = torch.empty(size, device=PLACE)
        assert x.isnan().all() and x.data_ptr() % 256 == 0


def test_devices_do_not_mix():
    x = drawn(3, 4)
    for other in (torch.ones(3, 4), drawn(3, 4).to(torch.device(PLACE.type, 1))):
        for mix in (
            torch.add,
            torch.mul,
            torch.minimum,
            lambda a, b: a @ b.t(),
            lambda a, b: torch.cat([a, b]),
        ):
            with pytest.raises(RuntimeError, match="same device|on one device"):
                mix(x, other)
    with pytest.raises(RuntimeError, match="on one device"):
        x.index_select(0, torch.tensor([0]))
    assert (x * torch.tensor(2.0)).device == PLACE  # a number, as CUDA takes it


def test_views_are_the_same_memory_and_no_launch():
    x = drawn(4, 6)
    with watched() as record:
        parts = [
            x.t(),
            x[1:, 2],
            x.view(2, 12),
            x.unfold(0, 2, 1),
            *x.split(2),
            *x.chunk(2, dim=1),
            x.expand(5, 4, 6),
        ]
        parts += [
            x.detach(),
            x.permute(1, 0),
            x.view(torch.int32),
            x.diagonal(),
            *x.unbind(),
            x.squeeze(),
            x.real,
        ]
    assert not record.launches and not record.waits
    assert {part.untyped_storage().data_ptr() for part in parts} == {x.untyped_storage().data_ptr()}
    x.zero_()
    assert all(not part.any() for part in parts)


WAITS = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: (x > 0).nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "cpu": lambda x: x.cpu(),
    "to the device": lambda x: torch.zeros(3).to(x.device),
    "unpinned": lambda x: torch.zeros(3).to(x.device, non_blocking=True),
    "from Python": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "synchronize": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream(x.device).synchronize(),
    "event": lambda x: torch.accelerator.current_stream(x.device).record_event().synchronize(),
    "write by a mask": lambda x: x.index_put_((x > 0,), x.new_ones(1)),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted(name):
    x = drawn(3, 4)
    with watched() as record:
        WAITS[name](x)
    assert len(record.waits) == 1, record.table(record.waits)


NO_WAITS = {
    "pinned": lambda x: torch.zeros(3).pin_memory().to(x.device, non_blocking=True),
    "to pinned": lambda x: torch.zeros(3, 4).pin_memory().copy_(x, non_blocking=True),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill_(x > 0, 0.0),
    "made there": lambda x: (
        torch.zeros(3, device=x.device),
        torch.full((2,), 3.0, device=x.device),
        x.new_ones(2),
    ),
    "arange": lambda x: torch.arange(10, device=x.device),
    "events": lambda x: torch.Stream(x.device).wait_event(
        torch.accelerator.current_stream(x.device).record_event()
    ),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_is_not_counted(name):
    x = drawn(3, 4)
    with watched() as record:
        NO_WAITS[name](x)
    assert not record.waits, record.table(record.waits)


def test_launches_are_counted_once_and_by_name():
    x, norm = drawn(3, 4), nn.LayerNorm(4).to(PLACE)
    with watched() as record:
        x.add(x).mul_(2.0)
        x.t().contiguous()
        functional.dropout(norm(x), 0.5)
        torch._foreach_add_([x, x.clone()], 1.0)
    wanted = [
        "add",
        "mul",
        "copy_",
        "native_layer_norm",
        "native_dropout",
        "copy_",
        "_foreach_add_",
    ]
    assert [event.what for event in record.launches] == wanted


def test_streams_order_what_they_are_given():
    x, side = drawn(3), torch.Stream(PLACE)
    with watched() as record:
        with side:
            assert torch.accelerator.current_stream(PLACE) == side
            x.add_(1.0)
        x.add_(1.0)
    assert [event.stream for event in record.launches] == [side.stream_id, 0]


def beside(wait: bool = True, record: bool = True) -> None:
    """A piece of memory that is read on a side stream, and given back."""
    main, side, x = (
        torch.accelerator.current_stream(PLACE),
        torch.Stream(PLACE),
        torch.ones(100, device=PLACE),
    )
    if wait:
        side.wait_stream(main)
    with side:
        y = x * 2
    if record:
        x.record_stream(side)
    del x
    main.wait_event(side.record_event())
    assert y.add(1).sum().item() == 300
    y.record_stream(main)


def test_what_no_event_orders_is_reported():
    with ordered():
        beside()
    early = r"mul reads 400 bytes .* on stream \d+, which fill_ wrote .* nothing orders"
    with pytest.raises(RuntimeError, match=early), ordered():
        beside(wait=False)
    with (
        pytest.raises(RuntimeError, match=r"ends on stream 0, but mul on stream \d+ reads it"),
        ordered(),
    ):
        beside(record=False)
    beside(wait=False, record=False)  # nobody looks


def test_futures_hand_tensors_on():
    future = torch.futures.Future(devices=[PLACE])
    future.set_result(torch.ones(3, device=PLACE))
    with watched() as record:
        found = future.then(lambda done: done.value() + 1).wait()
    assert found.tolist() == [2.0, 2.0, 2.0] and not record.waits


def net() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5)
    )


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_a_training_is_the_cpus(options):
    here = net()
    there = copy.deepcopy(here).to(PLACE)
    tokens = torch.randint(7, (4, 3))
    losses = []
    for model, place in ((here, torch.device("cpu")), (there, PLACE)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
        found = []
        for _ in range(3):
            out = model(tokens.to(place))
            loss = functional.cross_entropy(out.flatten(0, 1), tokens.to(place).flatten() % 5)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1] and losses[0][0] > losses[0][-1]


def test_random_numbers_are_the_devices_own():
    before = torch.get_rng_state()
    first = torch.rand(4, device=PLACE)
    assert torch.equal(torch.get_rng_state(), before)
    seeded = [
        torch.rand(4, device=PLACE, generator=torch.Generator(PLACE).manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*seeded) and not torch.equal(first, torch.rand(4, device=PLACE))


def test_shared_parameters_stay_shared():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    both = moved(nn.Sequential(first, second))
    assert both[0].weight is both[1].weight and both[0].weight.device == PLACE


def test_outputs_grow():
    out = torch.empty(0, device=PLACE)
    torch.add(torch.ones(3, device=PLACE), 1.0, out=out)
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_tensors_are_saved_and_loaded():
    x, file = drawn(3), io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=PLACE)["x"]
    assert loaded.device == PLACE and torch.equal(loaded, x)


def test_numbers_are_narrowed_on_the_device():
    x = drawn(3, 5)
    found = (x.bfloat16() @ x.t().bfloat16()).float().cpu()
    assert math.isclose(float(found.norm()), float((x.cpu() @ x.cpu().t()).norm()), rel_tol=0.05)
