"""lsq with sanitized libraries: python -m tests.commands.sanitized FOLDER COMMANDS.

FOLDER holds host libraries built with sanitizers; COMMANDS is JSON, a list of command lines of
`lsq`, run one after another. The emulator's libraries and kernels are sanitized as well. What then
is held by nobody goes to standard error, as LeakSanitizer has it.
"""

import ctypes
import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

from lsq.commands import cli
from lsq.native import loader, runtime
from lsq.run import cuda


def main(folder: Path, commands: list[list[str]]) -> int:
    """Run command lines up to the first that fails; its exit status, else 0."""
    loader._FOLDER, runtime.LIBRARY = folder, folder / runtime.LIBRARY.name
    cuda.emulated_device = partial(cuda.emulated_device, True)
    status = 0
    for command in commands:
        status = status or cli.main(command)
    gc.collect()
    ctypes.CDLL(None).__lsan_do_recoverable_leak_check()
    return status


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(found)  # what the interpreter leaves behind when it ends is nobody's fault here
