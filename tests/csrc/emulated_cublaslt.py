"""Builds the emulated libcublasLt, and the library that calls it where it is outdated, for tests."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import lsq.csrc

FOLDER = Path(lsq.csrc.__file__).parent
_COMPILE = ["g++", "-O2", "-std=c++17", "-Wall", "-Werror", "-fPIC", "-shared"]
_KEPT = tempfile.TemporaryDirectory()


def compile_library(sources: list[Path], target: Path, *flags: str) -> None:
    """One shared library of some .cpp files; replaced in one step, a running process may have it mapped."""
    staged = target.with_suffix(".partial")
    subprocess.run([*_COMPILE, *map(str, sources), *flags, "-o", str(staged)], check=True)
    staged.replace(target)


def ensure_runtime() -> None:
    """Make lsq/csrc/libruntime.so from its sources unless it is newer than all of them."""
    target, folder = FOLDER / "libruntime.so", FOLDER / "runtime"
    newest = max(path.stat().st_mtime for path in folder.iterdir())
    if not target.exists() or target.stat().st_mtime < newest:
        compile_library(sorted(folder.glob("*.cpp")), target, "-ldl")


class Emulated:
    """The emulated library, and what it counts and is told."""

    def __init__(self) -> None:
        self.path = str(Path(_KEPT.name) / "libemulated_cublasLt.so")
        compile_library([FOLDER / "emulator" / "products.cpp"], Path(self.path))
        self._library = ctypes.CDLL(self.path)
        self._library.emulated_calls.restype = ctypes.c_int64

    def calls(self, name: str) -> int:
        """How often cublasLt<name> was called."""
        return self._library.emulated_calls(f"cublasLt{name}".encode())

    def fail(self, name: str, status: int, times: int = 1) -> None:
        """Let the next calls of cublasLt<name> fail."""
        self._library.emulated_fail(f"cublasLt{name}".encode(), ctypes.c_int64(status), ctypes.c_int64(times))

    @property
    def streams(self):
        """The function that hands the work to a stream."""
        return self._library.emulated_streams


@functools.cache
def emulated() -> Emulated:
    """The library, built once for a whole run of tests."""
    ensure_runtime()
    return Emulated()
