"""Which C++ sources a host library was built from. Imports nothing of lsq: setup.py runs this file as well."""

import zlib
from pathlib import Path

FOLDER = Path(__file__).parent


def headers(folder: str) -> list[Path]:
    """What the sources of the library in `folder` ("cpu" or "runtime") include."""
    return sorted([*FOLDER.glob("*.h"), *FOLDER.joinpath(folder).glob("*.h")])


def checksum(folder: str) -> int:
    """CRC-32 of the names and contents of the C++ sources of a library; 0 where they were not installed."""
    implementations = sorted(FOLDER.joinpath(folder).glob("*.cpp"))
    value = 0
    for path in [*headers(folder), *implementations] if implementations else []:
        value = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes(), value)
    return value
