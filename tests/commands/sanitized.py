"""Run COMMANDS (JSON) with sanitized libraries: tests.commands.sanitized FOLDER COMMANDS."""

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
