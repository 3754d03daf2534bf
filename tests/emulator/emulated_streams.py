"""Streams, events, memory and captures of the emulated driver. Imports no torch."""

import contextlib
import ctypes

from tests.emulator.emulated import Module

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Modes of captures."""
NON_BLOCKING = 1
COUNT = 64
HOST = ctypes.c_void_p(-1)
"""Stands for the host in place of a stream's handle."""


def handle_of(stream):
    """What the driver takes for a stream; None is the null stream."""
    return stream.handle if stream is not None else None


class Stream:
    """A stream of the current context."""

    def __init__(self, driver, blocking=False):
        self.driver, self.handle = driver, ctypes.c_void_p()
        driver("cuStreamCreate", ctypes.byref(self.handle), 0 if blocking else NON_BLOCKING)

    def synchronize(self):
        self.driver("cuStreamSynchronize", self.handle)

    def wait(self, event):
        self.driver("cuStreamWaitEvent", self.handle, event.handle, 0)

    def wait_stream(self, other):
        """What is submitted from now on comes after all that `other` has."""
        self.wait(Event(self.driver).record(other))


class Event:
    """An event of the current context."""

    def __init__(self, driver):
        self.driver, self.handle = driver, ctypes.c_void_p()
        driver("cuEventCreate", ctypes.byref(self.handle), 0)

    def record(self, stream):
        self.driver("cuEventRecord", self.handle, handle_of(stream))
        return self

    def synchronize(self):
        self.driver("cuEventSynchronize", self.handle)


class Memory:
    """Memory of the device, allocated in the order of a stream."""

    def __init__(self, driver, count, stream=None, kind=ctypes.c_int):
        self.driver, self.handle = driver, ctypes.c_void_p()
        size = ctypes.c_size_t(count * ctypes.sizeof(kind))
        driver("cuMemAllocAsync", ctypes.byref(self.handle), size, handle_of(stream))
        self.values = (kind * count).from_address(self.handle.value)

    @property
    def address(self):
        return self.handle.value

    def free(self, stream=None):
        self.driver("cuMemFreeAsync", self.handle, handle_of(stream))


class Graph:
    """What a capture recorded."""

    def __init__(self, driver):
        self.driver, self.executable = driver, ctypes.c_void_p()

    def launch(self, stream=None):
        self.driver("cuGraphLaunch", self.executable, handle_of(stream))


@contextlib.contextmanager
def captured(stream, mode=THREAD_LOCAL):
    """Capture a stream; the graph can be launched afterwards."""
    driver, graph = stream.driver, ctypes.c_void_p()
    driver("cuStreamBeginCapture_v2", stream.handle, mode)
    made = Graph(driver)
    try:
        yield made
    finally:
        driver("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
    driver(
        "cuGraphInstantiateWithFlags", ctypes.byref(made.executable), graph, ctypes.c_ulonglong(0)
    )
    driver("cuGraphDestroy", graph)


@contextlib.contextmanager
def watched(driver):
    """Uses of memory that nothing orders are errors."""
    driver("lsq_emulator_watch", 1)
    try:
        yield
    finally:
        driver("lsq_emulator_watch", 0)


@contextlib.contextmanager
def device(driver, number):
    """The context of a device is current."""
    context = ctypes.c_void_p()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    driver("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        driver("cuCtxPopCurrent_v2", None)


class Work:
    """Launches of the kernels of ordered.cu on streams, on memory of COUNT integers."""

    def __init__(self):
        self.module = Module("ordered.cu")
        self.driver = self.module.driver
        self.module.function("fill"), self.module.function("copy")

    def fill(self, x, stream=None, value=7):
        self.module.launch("fill", 2, 32, x.address, value, stream=handle_of(stream))

    def copy(self, x, y, stream=None):
        self.module.launch("copy", 2, 32, x.address, y.address, stream=handle_of(stream))

    def look(self, x, writes=0, name=b"the host's look"):
        """The host reads or writes memory."""
        size = ctypes.c_size_t(4 * COUNT)
        self.driver("lsq_emulator_use", HOST, name, getattr(x, "handle", x), size, writes)

    def memory(self, stream=None):
        return Memory(self.driver, COUNT, stream)

    def streams(self, count=2, **options):
        return [Stream(self.driver, **options) for _ in range(count)]
