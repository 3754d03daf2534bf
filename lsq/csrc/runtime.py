"""Calls the launcher in csrc/runtime: a CUDA driver, its functions, and lists of work that one call replays."""

import ctypes
import functools
import itertools
import struct
from pathlib import Path

from lsq.csrc import shared_library
from lsq.csrc.shared_library import LibraryError

LIBRARY = Path(__file__).parent / "libruntime.so"
MESSAGE_BYTES = 8192


@functools.cache
def library() -> ctypes.CDLL:
    """The launcher.

    Raises:
        LibraryError: it is not built, is damaged, or was built from other sources than those beside it.
    """
    if not LIBRARY.exists():
        raise LibraryError(
            f"the launcher {LIBRARY.name} is not built; install g++ (Debian: apt-get install g++) and install lsq again"
        )
    found = shared_library.load(LIBRARY, "runtime")
    found.lsq_list_create.restype = ctypes.c_void_p
    return found


def call(name: str, *arguments) -> tuple[int, str]:
    """Call a function that returns a status and fills a message: both. Whole numbers go as int64."""
    function = getattr(library(), name)
    function.restype = ctypes.c_int64
    numbers = (ctypes.c_int64(argument) if isinstance(argument, int) else argument for argument in arguments)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    status = function(*numbers, message, ctypes.c_int64(MESSAGE_BYTES))
    return status, message.value.decode(errors="replace")


def _call(name: str, *arguments) -> None:
    status, message = call(name, *arguments)
    if status:
        raise RuntimeError(message)


class Driver:
    """A CUDA driver, or the emulator's.

    Args:
        path: of libcuda.so.1.

    Raises:
        RuntimeError: it cannot be opened, or finds no GPU.
    """

    def __init__(self, path: str):
        self.handle, version = ctypes.c_void_p(), ctypes.c_int64()
        _call("lsq_driver_open", path.encode(), ctypes.byref(self.handle), ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)
        """Newest CUDA version that it supports."""

    def load(self, image: bytes, name: str, shared: int) -> int:
        """The handle of kernel `name` in machine code, in the current context, for `shared` bytes of dynamic memory.

        It stays loaded as long as the process lives.

        Raises:
            RuntimeError: the driver refuses it.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        places = ctypes.byref(module), ctypes.byref(function)
        _call("lsq_function_load", self.handle, image, name.encode(), shared, *places)
        return function.value


class Replay:
    """A list of launches and products at fixed addresses, in C++."""

    def __init__(self, driver: Driver):
        self._library = library()
        self._driver = driver
        self._list = ctypes.c_void_p(self._library.lsq_list_create(driver.handle))
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)

    def add_launch(self, what: str, function: int, grid, block, shared: int, values: list[bytes]) -> None:
        """Append a launch; `what` names it in errors, `values` holds the bytes of each argument, a multiple of 8."""
        begins = itertools.accumulate((len(value) // 8 for value in values), initial=0)
        *begins, count = begins
        self._library.lsq_list_add_launch(
            self._list, what.encode(), ctypes.c_void_p(function), (ctypes.c_int64 * 6)(*grid, *block),
            ctypes.c_int64(shared), b"".join(values), ctypes.c_int64(count),
            (ctypes.c_int64 * len(values))(*begins), ctypes.c_int64(len(values)),
        )

    def add_product(
        self, what: str, product: int, a: int, b: int, out: int, alphas: int | None, alpha: float,
        workspace: tuple[int, int],
    ) -> None:
        """Append a product (the handle of lsq.csrc.products) on these addresses; workspace: address and bytes."""
        self._library.lsq_list_add_product(
            self._list, what.encode(), *map(ctypes.c_void_p, (product, a, b, out, alphas)), ctypes.c_float(alpha),
            ctypes.c_void_p(workspace[0]), ctypes.c_int64(workspace[1]),
        )

    def close(self) -> None:
        """End the list."""
        self._library.lsq_list_close(self._list)

    def run(self, stream: int) -> None:
        """Launch everything.

        Raises:
            RuntimeError: an entry failed; the message names it.
        """
        if self._library.lsq_list_run(
            self._list, ctypes.c_void_p(stream), self._message, ctypes.c_int64(MESSAGE_BYTES)
        ):
            raise RuntimeError(self._message.value.decode(errors="replace"))

    def __del__(self) -> None:
        self._library.lsq_list_destroy(self._list)


def argument(value: int | float) -> bytes:
    """8 bytes that a kernel reads as int64_t, or as float in the first four."""
    return struct.pack("<fxxxx", value) if isinstance(value, float) else struct.pack("<q", value)


def address(value: int) -> bytes:
    """8 bytes that a kernel reads as a pointer."""
    return struct.pack("<Q", value)
