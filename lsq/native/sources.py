"""Checksums of the C++ sources of a host library, and seals of built libraries.

Imports nothing of lsq: setup.py runs this file as well.
"""

import functools
import hashlib
import runpy
import sys
import zlib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "csrc"


@functools.cache
def operations_header() -> str:
    """The text of operations.h, which the sources in "cpu" and all kernels include; see
    declarations.py."""
    known = sys.modules.get("lsq.native.declarations")  # which has read them already
    return (
        known.header()
        if known
        else runpy.run_path(str(Path(__file__).with_name("declarations.py")))["header"]()
    )


def headers(folder: str) -> list[Path]:
    """Headers of the library in `folder` ("cpu" or "runtime")."""
    return sorted([*FOLDER.joinpath("include").glob("*.h"), *FOLDER.joinpath(folder).glob("*.h")])


def checksum(folder: str) -> int:
    """CRC-32 of the names and contents of the C++ sources of a library; 0 where they were not
    installed."""
    implementations = sorted(FOLDER.joinpath(folder).glob("*.cpp"))
    value = zlib.crc32(operations_header().encode()) if folder == "cpu" and implementations else 0
    for path in [*headers(folder), *implementations] if implementations else []:
        value = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes(), value)
    return value


def sealed(content: bytes) -> bytes:
    """What is written of a library: behind its content, where nothing that loads it looks, the
    SHA-256 of that."""
    return content + hashlib.sha256(content).digest()


def unsealed(content: bytes) -> bytes:
    """What `sealed` was given, or nothing where this is not what it returned: a byte less, or one
    changed."""
    size = hashlib.sha256().digest_size
    inner, seal = content[:-size], content[-size:]
    return inner if hashlib.sha256(inner).digest() == seal else b""
