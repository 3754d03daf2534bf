"""Checksums of C++ sources, seals of built libraries, and loading. A library is loaded only if it
is whole and was built from the sources beside it.

Imports nothing of lsq: setup.py runs this file as well.
"""

import ctypes
import functools
import hashlib
import os
import runpy
import sys
import zlib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "csrc"
REMEDY = (
    "build it again: `make library`, or `pip install --no-build-isolation --editable .` in the"
    " repository"
)


class LibraryError(RuntimeError):
    """A library of lsq is missing, damaged or of other sources; the user can repair that."""


@functools.cache
def operations_header() -> str:
    """Return the text of operations.h (declarations.py), for sources in "cpu" and kernels."""
    known = sys.modules.get("lsq.native.declarations")  # it has read the declarations already
    return (
        known.header()
        if known
        else runpy.run_path(str(Path(__file__).with_name("declarations.py")))["header"]()
    )


def headers(folder: str) -> list[Path]:
    """Return the headers of the library in `folder` ("cpu" or "runtime")."""
    return sorted([*FOLDER.joinpath("include").glob("*.h"), *FOLDER.joinpath(folder).glob("*.h")])


def checksum(folder: str) -> int:
    """Return the CRC-32 of names and contents of a library's C++ sources; 0: not installed."""
    implementations = sorted(FOLDER.joinpath(folder).glob("*.cpp"))
    value = zlib.crc32(operations_header().encode()) if folder == "cpu" and implementations else 0
    for path in [*headers(folder), *implementations] if implementations else []:
        value = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes(), value)
    return value


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def unsealed(content: bytes) -> bytes:
    """Return the content that was sealed; b"" if a byte is missing or changed."""
    size = hashlib.sha256().digest_size
    inner, seal = content[:-size], content[-size:]
    return inner if hashlib.sha256(inner).digest() == seal else b""


def load(path: Path, folder: str) -> ctypes.CDLL:
    """Load the library at `path`, built from the sources in `folder`. Raises LibraryError: it is
    damaged (loading would kill the process) or of other sources; OSError: it cannot be read."""
    if not unsealed(path.read_bytes()):
        raise LibraryError(f"{path} is damaged, or was not built by this version of lsq; {REMEDY}")
    library = ctypes.CDLL(os.fspath(path))
    library.lsq_sources.restype = ctypes.c_uint32
    wanted = checksum(folder)
    if wanted and library.lsq_sources() != wanted:
        raise LibraryError(
            f"{path.name} was built from other C++ sources than those in {FOLDER / folder};"
            f" {REMEDY}"
        )
    return library
