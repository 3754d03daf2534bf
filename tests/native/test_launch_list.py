"""Lists on several streams: they follow each other, and share a ticket and a workspace with other
lists of a stream."""

import shutil

import pytest
import torch

from lsq.native.launch import Launch, Product
from lsq.ops.rounding import Round
from lsq.program.values import Coded
from lsq.quant import Format, Grain
from lsq.run import cuda
from tests.emulator.emulated import Driver
from tests.emulator.emulated_streams import Stream
from tests.native.test_runtime import store

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def with_a_workspace(products, key, found):
    """The algorithm that needs the largest."""
    return max(found, key=lambda one: one.workspace_bytes)


class Streams:
    """A device whose current stream a test says; it notes who waits for whom and which tensors are
    recorded."""

    def __init__(self, monkeypatch):
        self.device = cuda.emulated_device.__wrapped__(choose=with_a_workspace)
        self.current, self.capturing, self.waits, self.recorded = 0, False, [], []
        driver = Driver()
        self.handles = [0, *(Stream(driver).handle.value for _ in range(8))]
        for holder, name, value in (
            (self.device, "stream", lambda: self.handles[self.current]),
            (self.device, "record", self.recorded.append),
            (
                self.device.driver,
                "follow",
                lambda *streams: self.waits.append(tuple(map(self.handles.index, streams))),
            ),
            (self.device.driver, "is_capturing", lambda stream: self.capturing),
        ):
            monkeypatch.setattr(holder, name, value)


@pytest.fixture
def streams(monkeypatch) -> Streams:
    return Streams(monkeypatch)


def product(rows: int) -> Product:
    a, b = torch.ones(rows, 64, dtype=torch.int8), torch.ones(48, 64, dtype=torch.int8)
    return Product(a=a, b=b, out=torch.zeros(rows, 48, dtype=torch.int32))


def rounding() -> Launch:
    """A launch that takes tickets."""
    form = Format(name="activation", bits=8, grain=Grain.TENSOR)
    rounded = Coded(
        format=form,
        codes=torch.empty(41, 48, dtype=torch.int8),
        scale=torch.empty(1),
        clip=torch.ones(1),
    )
    (entry,) = Round(x=torch.randn(41, 48), rounded=rounded).cuda()
    return entry


def test_a_run_waits_for_the_last_one_on_another_stream(streams):
    memory = torch.zeros(6, dtype=torch.int64)
    work = streams.device.list([store(memory, 0, 1)])
    for streams.current in (0, 5, 5, 0, 5):
        work.run()
    assert streams.waits == [(0, 5), (5, 0), (0, 5)]
    assert [id(tensor) for tensor in streams.recorded] == [id(memory)] * 2  # once for each stream


def test_a_list_waits_for_the_stream_that_its_memory_was_made_on(streams):
    streams.current = 3
    work = streams.device.list([store(torch.zeros(6, dtype=torch.int64), 0, 1)])
    streams.current = 4
    work.run()
    assert streams.waits == [(3, 4)] and len(streams.recorded) == 1


def test_a_captured_run_waits_for_nobody_and_has_memory_of_its_own(streams):
    work = streams.device.list([product(41)])
    work.run()
    shared = streams.device.memory(0, 0, False)
    streams.current, streams.capturing = 7, True
    work.run()
    assert streams.waits == []
    (own,) = work._captured
    assert own.ticket.data_ptr() != shared.ticket.data_ptr()
    assert own.workspace.data_ptr() != shared.workspace.data_ptr()


def test_only_lists_that_take_tickets_have_them_made(streams):
    """To fill them is a launch, which a graph would repeat."""
    work = streams.device.list([product(41)])
    streams.capturing = True
    work.run()
    assert "ticket" not in vars(work._captured[0])
    taking = streams.device.list([rounding()])
    taking.run()
    assert "ticket" in vars(taking._captured[0])


def test_captures_that_are_replayed_in_turn_share_memory_that_was_made_before(streams):
    lists = [streams.device.list([product(rows)]) for rows in (41, 300)]
    streams.capturing = True
    with streams.device.captures_in_turn():
        for work in lists:
            work.run()
    (first,), (second,) = (work._captured for work in lists)
    assert first is second and "ticket" in vars(first)
    assert first.workspace.numel() == max(work._workspace_bytes for work in lists)
    lists[0].run()
    assert lists[0]._captured[-1] is not first


def test_lists_of_a_stream_share_a_workspace_that_grows(streams):
    work = [streams.device.list([product(rows)]) for rows in (41, 300)]
    needs = [one._workspace_bytes for one in work]
    for one in work:
        one.run()
    shared = streams.device.memory(0, 0, False)
    assert shared.workspace.numel() == max(needs) > 0
    work[0].run()
    assert streams.device.memory(0, 0, False) is shared
    streams.current = 1
    work[1].run()
    other = streams.device.memory(streams.handles[1], 0, False)
    assert other is not shared and other.ticket.data_ptr() != shared.ticket.data_ptr()
