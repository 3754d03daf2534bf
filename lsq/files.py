"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path

PARTIAL = ".partial"
"""How the name of a file ends that is being written."""


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file; what was there before stays until all of the new text is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # of a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
