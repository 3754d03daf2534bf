"""Lines of text from files, checked."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 2**26
"""Bytes of a line, at most: without an end, /dev/zero and the like would fill the memory."""


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """The lines of a UTF-8 file as they come; lines end at a line feed only.

    Raises:
        ValueError: a line is not UTF-8, holds a NUL byte or is longer than LONGEST; says which, of
            the file `name`.
    """
    number = 0
    while raw := file.readline(LONGEST + 1):
        number += 1
        if len(raw) > LONGEST:
            raise ValueError(
                f"{name}, line {number} has more than {LONGEST} bytes; it must hold one sentence a"
                " line"
            )
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if b"\0" in raw:
            raise ValueError(
                f"{name}, line {number}: a NUL byte is no text; remove it, e.g. with tr -d '\\000'"
            )
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: byte 0x{raw[error.start]:02x} is not valid UTF-8;"
                " convert the file first, e.g. with iconv"
            ) from None
