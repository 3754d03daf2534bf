"""The emulated driver reports uses of memory that no event orders, and memory that is used after
its end."""

import ctypes

import pytest

from tests.emulator.emulated import fails, memory
from tests.emulator.emulated_streams import COUNT, Event, Work, watched

LAUNCH_FAILED = 719


@pytest.fixture
def work():
    work = Work()
    with watched(work.driver):
        yield work


@pytest.fixture
def pair(work):
    """Two pieces of memory whose beginning everybody knows."""
    pair = work.memory(), work.memory()
    work.driver("cuCtxSynchronize")
    return pair


def test_a_use_before_the_event_that_orders_it_is_reported(work, pair):
    (x, y), (first, second) = pair, work.streams()
    work.fill(x, first)
    message = (
        rf"kernel copy, block \(0, 0, 0\): thread \(0, 0, 0\) reads 4 bytes at {x.address:#x}"
        r" \(byte 0 of 256 of the memory of 256 bytes\) on stream \d+, which kernel fill wrote on"
        r" stream \d+; nothing orders the two"
    )
    with fails(message, LAUNCH_FAILED):
        work.copy(x, y, second)
    second.wait_stream(first)
    work.copy(x, y, second)
    assert list(y.values) == [7] * COUNT


@pytest.mark.parametrize(
    "done, message", [("fill", "kernel fill wrote"), ("copy", "kernel copy read")]
)
def test_a_write_is_ordered_behind_writes_and_reads(work, pair, done, message):
    (x, y), (first, second) = pair, work.streams()
    work.fill(x, first) if done == "fill" else work.copy(x, y, first)
    with fails(f"writes 4 bytes .*, which {message} on stream"):
        work.fill(x, second)


def test_an_event_orders_what_came_before_it_alone(work, pair):
    (x, y), (first, second) = pair, work.streams()
    event = Event(work.driver).record(first)
    work.fill(x, first)
    second.wait(event)
    with fails("nothing orders the two"):
        work.copy(x, y, second)


def test_the_null_stream_and_blocking_streams_alone_wait_for_each_other(work, pair):
    (x, y), (blocking,), (free,) = pair, work.streams(1, blocking=True), work.streams(1)
    work.fill(x, blocking)
    work.copy(x, y)
    work.fill(x, blocking)
    with fails("on stream 0; nothing orders|on stream 0, which"):
        work.fill(y, free)


@pytest.mark.parametrize("wait", ["stream", "event", "device"])
def test_what_the_host_has_waited_for_is_over(work, pair, wait):
    (x, y), (first, second) = pair, work.streams()
    work.fill(x, first)
    event = Event(work.driver).record(first)
    with fails("the host's look reads 256 bytes .* on the host, which kernel fill wrote"):
        work.look(x)
    waits = {"stream": first.synchronize, "event": event.synchronize}
    waits.get(wait, lambda: work.driver("cuCtxSynchronize"))()
    work.look(x)
    work.copy(x, y, second)


def test_pinned_memory_is_written_again_only_after_its_copy(work, pair):
    (x, _), (stream,), pinned = pair, work.streams(1), memory(COUNT, ctypes.c_int)
    work.look(pinned, 1, b"new numbers")
    work.driver("cuMemcpyAsync", x.handle, pinned, ctypes.c_size_t(4 * COUNT), stream.handle)
    with fails("new numbers writes .*, which a copy read on stream"):
        work.look(pinned, 1, b"new numbers")
    stream.synchronize()
    work.look(pinned, 1, b"new numbers")


def test_atomic_operations_are_ordered_as_writes(work, pair):
    (ticket, out), (first, second) = pair, work.streams()
    given = "take_ticket", 4, 1, ticket.address, out.address
    work.module.launch(*given, stream=first.handle)
    with fails("take_ticket, .* writes 4 bytes .*, which kernel take_ticket wrote"):
        work.module.launch(*given, stream=second.handle)


def test_memory_begins_in_the_order_of_its_stream(work):
    first, second = work.streams()
    x = work.memory(first)
    with fails(r"writes 4 bytes .*, which begins on stream \d+; nothing orders the two"):
        work.fill(x, second)


def test_memory_that_has_ended_is_used_by_nobody(work, pair):
    x, y = pair
    x.free()
    with fails("reads 4 bytes .*, which ended on stream 0"):
        work.copy(x, y)


def test_memory_ends_after_all_that_uses_it(work, pair):
    (x, y), (stream,) = pair, work.streams(1)
    work.copy(x, y, stream)
    with fails(r"ends on stream 0, but kernel copy on stream \d+ reads it; nothing orders"):
        x.free()
    work.driver("cuMemFree_v2", y.handle)  # which waits for the device
    z = work.memory(stream)
    work.fill(z, stream)
