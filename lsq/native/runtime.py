"""Calls the launcher in csrc/runtime: the CUDA driver and its functions (lists: launch_list.py)."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from lsq.native import sources
from lsq.native.sources import LibraryError

LIBRARY = Path(__file__).parent / "libruntime.so"
MESSAGE_BYTES = 8192


@functools.cache
def library() -> ctypes.CDLL:
    """Return the launcher. Raises LibraryError: it is not built, is damaged, or was built from
    other sources than those beside it."""
    if not LIBRARY.exists():
        raise LibraryError(
            f"the launcher {LIBRARY.name} is not built; install g++ (Debian: apt-get install g++)"
            " and install lsq again"
        )
    found = sources.load(LIBRARY, "runtime")
    found.lsq_list_create.restype = ctypes.c_void_p
    return found


def call(name: str, *arguments) -> tuple[int, str]:
    """Call a function; return its status and message. Whole numbers are passed as int64."""
    function = getattr(library(), name)
    function.restype = ctypes.c_int64
    numbers = (
        ctypes.c_int64(argument) if isinstance(argument, int) else argument
        for argument in arguments
    )
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = function(*numbers, message, ctypes.c_int64(MESSAGE_BYTES))
    return status, message.value.decode(errors="replace")


def _call(name: str, *arguments) -> None:
    status, message = call(name, *arguments)
    if status:
        raise RuntimeError(message)


class Driver:
    """A CUDA driver (`path`: libcuda.so.1) or the emulator's, for device `ordinal`. It uses the
    device's primary context, as PyTorch does, and makes it when it is first needed. Raises
    RuntimeError: the driver cannot be opened, or finds no GPU."""

    def __init__(self, path: str, ordinal: int = 0):
        self.handle, version = ctypes.c_void_p(), ctypes.c_int64()
        _call(
            "lsq_driver_open",
            path.encode(),
            ordinal,
            ctypes.byref(self.handle),
            ctypes.byref(version),
        )
        self.version = (version.value // 1000, version.value % 1000 // 10)
        """Newest CUDA version that it supports: (major, minor)."""

    def load(self, image: bytes, name: str, shared: int) -> int:
        """Load machine code for good; return the handle of its kernel `name`, with `shared` bytes
        of dynamic shared memory. Raises RuntimeError: the driver refuses it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        handles = ctypes.byref(module), ctypes.byref(function)
        _call("lsq_function_load", self.handle, image, name.encode(), shared, *handles)
        return function.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread within the context manager. Raises
        RuntimeError: there is no such device, or the driver refuses."""
        entered = ctypes.c_void_p()
        _call("lsq_context_enter", self.handle, ctypes.byref(entered))
        try:
            yield
        finally:
            library().lsq_context_leave(entered)

    def follow(self, before: int, after: int) -> None:
        """Let later work on stream `after` wait for all work that stream `before` has so far."""
        _call("lsq_stream_follow", self.handle, ctypes.c_void_p(before), ctypes.c_void_p(after))

    def is_capturing(self, stream: int) -> bool:
        return bool(library().lsq_stream_capturing(self.handle, ctypes.c_void_p(stream)))
