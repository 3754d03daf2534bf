"""Finds the C++ host library that this CPU can run, and calls it.

setup.py builds the library once per x86-64 level (v4: AVX-512, v3: AVX2, v1: any); elsewhere there
is v1 alone. Without a library, every operation runs its plain PyTorch reference; that is said once.
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
    """The loaded library, or None (said once) where none was built. Raises LibraryError: it is
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

    An operation goes as its struct, tensors (contiguous, on the CPU) as pointers, None as a null
    pointer, whole numbers and truth values as int64, floats as float32.
    """
    function(name)(*map(_convert, arguments))


def function(name: str):
    """A function of the library. Raises LibraryError: it has none of that name."""
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
    """Run the loop of an operation on tensors in memory of the CPU."""
    function(f"lsq_{operation.name}")(operation.packed)


def words(struct: bytes) -> ctypes.Array:
    """A copy of a struct that can be changed, 8 bytes at a time."""
    return (ctypes.c_uint64 * (len(struct) // 8)).from_buffer_copy(struct)


def sequence(operations: Sequence) -> Callable[[], None]:
    """A function that runs the loops of `operations` in one foreign call; it keeps their
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
