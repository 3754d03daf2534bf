"""The emulated libcublasLt: its path, what it counts, and how to make it fail."""

import ctypes
import functools

from lsq import emulator


class Emulated:
    """One process's emulated library."""

    def __init__(self) -> None:
        self.path = str(emulator.build_products())
        self._library = ctypes.CDLL(self.path)
        self._library.emulated_calls.restype = ctypes.c_int64

    def calls(self, name: str) -> int:
        """How often cublasLt<name> was called."""
        return self._library.emulated_calls(f"cublasLt{name}".encode())

    def fail(self, name: str, status: int, times: int = 1) -> None:
        """Let the next calls of cublasLt<name> fail."""
        self._library.emulated_fail(
            f"cublasLt{name}".encode(), ctypes.c_int64(status), ctypes.c_int64(times)
        )


@functools.cache
def emulated() -> Emulated:
    """The library, built when it is first wanted."""
    return Emulated()


def split_of(algorithm: bytes) -> int:
    """Parts of K that an algorithm of the emulated library adds up (products.cpp)."""
    return int.from_bytes(algorithm[12:16], "little")
