"""One training at a time writes into a folder of checkpoints (--save-dir), and nothing else there
is touched.

Importing this module replaces fairseq's own look at the folder, which writes and deletes a file
called "dummy" there.
"""

import atexit
import contextlib
from pathlib import Path

from fairseq import checkpoint_utils

from lsq.files.lock import locked_folder

_held = contextlib.ExitStack()


def claim(folder: str) -> None:
    """Takes the place of fairseq's verify_checkpoint_directory, which the first process calls
    before a training.

    The folder is this process's until `release`, or until the process ends.

    Raises:
        Busy: another training writes there; names the process.
        OSError: the folder cannot be written.
    """
    release()
    _held.enter_context(locked_folder(Path(folder), "choose another --save-dir"))


def release() -> None:
    """Let others write into the folder of `claim`."""
    _held.close()


checkpoint_utils.verify_checkpoint_directory = claim
atexit.register(release)
