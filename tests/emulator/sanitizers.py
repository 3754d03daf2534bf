"""How to start a process that loads libraries built with AddressSanitizer and
UndefinedBehaviorSanitizer."""

import os
from pathlib import Path

from lsq.emulator import build


def sanitizer_environment() -> dict[str, str]:
    """The variables with which a child process must be started that loads libraries built with
    `sanitize=True`.

    Raises:
        RuntimeError: no compiler, or it has no sanitizer libraries.
    """
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        path = Path(build._run([*build._compiler(), f"-print-file-name={name}"]).strip())
        if not path.is_absolute():
            raise RuntimeError(
                f"{build._compiler()[0]} has no {name}; install g++ with its sanitizer libraries"
            )
        libraries.append(os.fspath(path.resolve()))
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
