"""Finds the libraries of CUDA that lsq opens by itself."""

import ctypes
import os
import sys
from pathlib import Path

_SONAME = "libcublasLt.so.13"
_ADVICE = "install CUDA's libraries with `pip install lsq[cuda13]`, or a build of torch for CUDA"


def find_cublaslt() -> str:
    """Path or name of libcublasLt: CUDA's packages or toolkit, else torch's files, else what the system's loader finds.

    Raises:
        RuntimeError: there is none.
    """
    return _by_pathfinder() or _among_packages() or _by_loader()


def _by_pathfinder() -> str | None:
    try:
        from cuda import pathfinder
    except ImportError:
        return None
    try:
        return pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    except (pathfinder.DynamicLibNotFoundError, pathfinder.DynamicLibNotAvailableError):
        return None


def _among_packages() -> str | None:
    """The file of the packages that torch's CUDA builds depend on, without asking anyone."""
    found = [path for folder in sys.path for path in Path(folder or ".").glob("nvidia/*/lib/libcublasLt.so.*")]
    return os.fspath(max(found, key=lambda path: path.name)) if found else None


def _by_loader() -> str:
    try:
        ctypes.CDLL(_SONAME)
    except OSError as error:
        raise RuntimeError(f"no libcublasLt was found ({error}): {_ADVICE}") from error
    return _SONAME
