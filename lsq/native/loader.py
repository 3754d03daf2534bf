"""Finds the C++ host library that this CPU can run, and calls it.

setup.py builds it once for each x86-64 level (v4: AVX-512, v3: AVX2, v1: any); on other processors
there is only v1. Without the library, operations run their reference in plain PyTorch, with one
warning.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch  # loads the OpenMP runtime that the library shares with PyTorch

from lsq.native import sources
from lsq.native.processor import cpu_features

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_REQUIRED = {
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v3": {"avx2", "bmi1", "bmi2", "fma", "f16c", "movbe"},
    "v1": set(),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the loaded library; None, with one warning: none was built. Raises LibraryError: it is
    damaged, or was built from other sources than those beside it."""
    found = _load()
    if found is None:
        logger.warning(
            "the C++ host library of lsq is not built; operations run as plain PyTorch, several"
            " times slower. Install g++ (Debian: apt-get install g++) and reinstall lsq."
        )
    return found


def _load() -> ctypes.CDLL | None:
    for level, features in _REQUIRED.items():
        path = _FOLDER / f"libcpu_{level}.so"
        if features <= cpu_features() and path.exists():
            return sources.load(path, "cpu")
    return None


def available() -> bool:
    return library() is not None


def description() -> str:
    found = library()
    if found is None:
        return "plain PyTorch (no C++ host library)"
    names = {"v4": "AVX-512", "v3": "AVX2", "v1": "baseline"}
    level = Path(found._name).stem.removeprefix("libcpu_")
    return f"C++ host library, {names[level]}"


def call(name: str, *arguments) -> None:
    """Call a function of the library.

    An operation is passed as its struct, a contiguous CPU tensor as a pointer, None as a null
    pointer, whole numbers and truth values as int64, floats as float32.
    """
    function(name)(*map(_convert, arguments))


def function(name: str):
    """Return a function of the library. Raises LibraryError: the library has none of that name."""
    try:
        return getattr(library(), name)
    except AttributeError:
        raise sources.LibraryError(
            f"the C++ host library has no {name}; write it in lsq/csrc/cpu, or take the backend"
            " 'reference'"
        ) from None


def _convert(argument):
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if hasattr(argument, "packed"):
        return argument.packed
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    return ctypes.c_float(argument)


def run(operation) -> None:
    """Run the loop of an operation on CPU tensors."""
    function(f"lsq_{operation.name}")(operation.packed)


def words(struct: bytes) -> ctypes.Array:
    """Return a copy of a struct as words of 8 bytes, which can be changed."""
    return (ctypes.c_uint64 * (len(struct) // 8)).from_buffer_copy(struct)


def sequence(operations: Sequence) -> Callable[[], None]:
    """Return a function that runs all loops in one foreign call and keeps the operations'
    tensors."""
    found, count = library(), len(operations)
    structs = [operation.packed for operation in operations]
    loops = (ctypes.c_void_p * count)(
        *(
            ctypes.cast(function(f"lsq_{operation.name}"), ctypes.c_void_p).value
            for operation in operations
        )
    )
    pointers = (ctypes.c_void_p * count)(*map(ctypes.addressof, structs))

    def run(_alive=(operations, structs)) -> None:
        found.lsq_run_sequence(loops, pointers, ctypes.c_int64(count))

    return run
