"""Loads the libraries that setup.py builds, once they are known to be whole and of the sources
beside them."""

import ctypes
import os
from pathlib import Path

from lsq.native import sources

REMEDY = (
    "build it again: `make library`, or `pip install --no-build-isolation --editable .` in"
    " the"
    " repository"
)


class LibraryError(RuntimeError):
    """A library of lsq's is missing, damaged or of other sources: for the user to mend, and no
    fault of the program."""


def load(path: Path, folder: str) -> ctypes.CDLL:
    """The library at `path`, which is built of the sources in `folder` ("cpu" or "runtime").

    Raises:
        LibraryError: it is damaged, which would end the process while it is loaded, or was built
            from other sources
            than those beside it: its functions may take other arguments.
        OSError: it cannot be read.
    """
    if not sources.unsealed(path.read_bytes()):
        raise LibraryError(f"{path} is damaged, or was not built by this version of lsq; {REMEDY}")
    found = ctypes.CDLL(os.fspath(path))
    found.lsq_sources.restype = ctypes.c_uint32
    wanted = sources.checksum(folder)
    if wanted and found.lsq_sources() != wanted:
        raise LibraryError(
            f"{path.name} was built from other C++ sources than those in {sources.FOLDER / folder};"
            f" {REMEDY}"
        )
    return found
