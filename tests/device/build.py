"""Builds the test device with the C++ compiler against PyTorch's headers, into the cache of the
emulator."""

import os
import shlex
import subprocess
from pathlib import Path

import torch

from lsq.native import cache

FOLDER = Path(__file__).parent / "csrc"
TORCH = Path(torch.__file__).parent
FLAGS = ["-O0", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


class CannotBuild(RuntimeError):
    """There is no C++ compiler, or no headers of PyTorch; the message says which."""


def library() -> Path:
    """The library, built if it is not there.

    Raises:
        CannotBuild: no compiler or no headers.
        RuntimeError: the build failed.
    """
    sources = sorted(FOLDER.iterdir())
    content = [path.read_bytes() for path in sources]
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    name = cache.digest(repr(FLAGS), torch.__version__, *compiler, *content)
    target = cache.folder("emulator").absolute() / f"standin-{name}.so"
    if target.exists():
        return target
    if not (TORCH / "include" / "ATen").exists():
        raise CannotBuild(f"this PyTorch has no headers in {TORCH / 'include'}")
    files = [os.fspath(path) for path in sources if path.suffix == ".cpp"]
    headers = ["-isystem", os.fspath(TORCH / "include")]
    libraries = [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-ldl"]
    staged = target.with_suffix(f".{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, *FLAGS, *headers, *files, *libraries, "-o", os.fspath(staged)]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CannotBuild(
            f"the C++ compiler {compiler[0]!r} cannot be run ({error.strerror})"
        ) from error
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr[:4000]}")
    staged.rename(target)
    return target
