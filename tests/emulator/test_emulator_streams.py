"""Contexts, streams and events of the emulated driver; captures hold what a real one's would."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.emulator.emulated import Module, fails
from tests.emulator.emulated_streams import (
    COUNT,
    GLOBAL,
    RELAXED,
    Event,
    Memory,
    Stream,
    Work,
    captured,
    device,
    watched,
)


@pytest.fixture
def work():
    return Work()


def refused(result, message=""):
    return fails(rf"(?s){message}", result)


def test_a_stream_or_a_function_of_another_context_is_refused(work):
    x, stream = work.memory(), Stream(work.driver)
    event = Event(work.driver)
    with device(work.driver, 1):
        message = r"stream \d+ does not belong to the current context, which is that of device 1"
        with refused(400, message):
            work.fill(x, stream)
        with refused(400, "kernel fill was loaded into another context"):
            work.fill(x)
        with refused(400, "the event does not belong to the context of stream 0 of device 1"):
            event.record(None)
        Stream(work.driver).wait(event)  # which an event may order, though


def test_a_missing_context_is_named(work):
    x, stream = work.memory(), Stream(work.driver)
    with ThreadPoolExecutor(1) as pool:
        for call in (work.memory, lambda: work.fill(x), stream.synchronize):
            with refused(201, "no context is current in this thread"):
                pool.submit(call).result()


def test_a_capture_runs_when_it_is_launched_with_the_addresses_and_numbers_of_its_time(work):
    x, y, stream = work.memory(), work.memory(), Stream(work.driver)
    work.driver("cuMemsetD8Async", x.handle, 0, ctypes.c_size_t(4 * COUNT), stream.handle)
    number = 7
    with captured(stream) as graph:
        work.fill(x, stream, number)
        work.driver("cuMemcpyAsync", y.handle, x.handle, ctypes.c_size_t(4 * COUNT), stream.handle)
    assert x.values[0] == 0
    for _ in range(2):
        x.values[0], y.values[0], number = 1, 2, 9
        graph.launch(stream)
        assert list(x.values) == list(y.values) == [7] * COUNT


def test_a_capture_takes_in_streams_that_wait_for_it(work):
    (x, y), first, second = [work.memory() for _ in range(2)], *work.streams()
    with watched(work.driver):
        with captured(first) as graph:
            work.fill(x, first)
            second.wait_stream(first)
            work.copy(x, y, second)
            first.wait_stream(second)
            work.copy(y, x, first)
        assert y.values[0] != 7
        for _ in range(2):
            graph.launch(first)
    assert y.values[0] == 7
    work.fill(y, second, 5)  # which is captured no more
    assert y.values[0] == 5


def test_branches_of_a_graph_that_nothing_orders_are_reported(work):
    (x, y), first, second = [work.memory() for _ in range(2)], *work.streams()
    with watched(work.driver):
        with captured(first) as graph:
            work.copy(x, y, first)
            event = Event(work.driver).record(first)
            work.fill(x, first)
            second.wait(event)
            work.copy(x, y, second)
            first.wait_stream(second)
        message = (
            "reads 4 .* on branch 1 of a graph, which kernel fill wrote on branch 0 of a graph"
        )
        with refused(719, message):
            graph.launch(first)


def test_a_graph_is_ordered_with_the_stream_that_it_is_launched_on(work):
    (x, y), first, second = [work.memory() for _ in range(2)], *work.streams()
    with captured(first) as graph:
        work.fill(x, first)
    with watched(work.driver):
        graph.launch(second)
        with refused(719, "reads 4 bytes .*, which kernel fill wrote on branch 0 of a graph"):
            work.copy(x, y, first)
        work.copy(x, y, second)
        with refused(719, "fill, .* writes 4 bytes .*, which kernel copy read"):
            graph.launch(first)


def allocate(work):
    work.driver("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(8))


FORBIDDEN = {
    "synchronize": (900, lambda work, stream: stream.synchronize()),
    "query": (900, lambda work, stream: work.driver("cuStreamQuery", stream.handle)),
    "synchronize all": (900, lambda work, stream: work.driver("cuCtxSynchronize")),
    "synchronize an event": (
        907,
        lambda work, stream: Event(work.driver).record(stream).synchronize(),
    ),
    "allocate": (900, lambda work, stream: allocate(work)),
    "free": (900, lambda work, stream: work.driver("cuMemFree_v2", work.memory().handle)),
    "load": (900, lambda work, stream: Module("sound.cu")),
    "allocate in order": (801, lambda work, stream: Memory(work.driver, 4, stream)),
    "wait for an event from before": (
        905,
        lambda work, stream: stream.wait(Event(work.driver).record(None)),
    ),
    "destroy": (900, lambda work, stream: work.driver("cuStreamDestroy_v2", stream.handle)),
}


@pytest.mark.parametrize("result, call", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_may_not_happen_in_a_capture_ends_it(work, result, call):
    x, stream = work.memory(), Stream(work.driver)
    with refused(901, "ended by what is not allowed in one"), captured(stream, GLOBAL):
        with refused(result):
            call(work, stream)
        with refused(901):
            work.fill(x, stream)
    work.fill(x, stream)
    assert x.values[0] == 7


def test_the_null_stream_takes_no_part_in_captures(work):
    x, stream, blocking = work.memory(), Stream(work.driver), Stream(work.driver, blocking=True)
    with refused(900, "stream 0 cannot be captured"):
        work.driver("cuStreamBeginCapture_v2", None, RELAXED)
    with captured(stream, RELAXED):
        work.fill(x)
    with refused(901), captured(blocking, RELAXED):
        with refused(906, r"kernel fill on stream 0 would wait for stream \d+, which is captured"):
            work.fill(x)


def test_a_stream_that_is_not_waited_for_is_named(work):
    (x, y), first, second = [work.memory() for _ in range(2)], *work.streams()
    with (
        refused(904, r"captured in stream \d+ for which stream \d+ has not waited"),
        captured(first),
    ):
        work.fill(x, first)
        second.wait_stream(first)
        work.copy(x, y, second)
    work.copy(x, y, second)
