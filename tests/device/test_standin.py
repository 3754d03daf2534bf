"""The test device itself: what it computes, what it refuses, what it counts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.device.standin import PLACE, ordered
from tests.device.watch import watched


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(PLACE)


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
