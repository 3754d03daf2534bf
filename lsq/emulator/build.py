"""Builds and caches the emulated CUDA libraries and the kernels that run in them.

The libraries stand in for libcuda and libcublasLt. Each kernel source becomes a shared library; the
image for `cuModuleLoadData` is the path of that library. All files lie in
`$XDG_CACHE_HOME/lsq/emulator` (or `~/.cache/lsq/emulator`). Their names depend on the sources,
flags and compiler, so that none is ever outdated.
"""

import functools
import logging
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from lsq.native import cache, sources

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
KERNELS = sources.FOLDER / "cuda"
SHARED = sources.FOLDER / "include"
"""Headers that kernels share with the host library."""

MAGIC = b"lsq-emulated-module\n"
DRIVER_SOURCES = (
    *("contexts.cpp", "streams.cpp", "memory.cpp", "order.cpp", "driver.cpp", "scheduler.cpp"),
    *("threads.cpp", "fibers.cpp", "barriers.cpp", "asynchronous.cpp", "races.cpp"),
    "counters.cpp",
)
PRODUCTS_SOURCES = ("products.cpp",)

# -ffp-contract=off: no fused multiply-adds, as in the host library and on the GPU.
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-fPIC", "-fvisibility=hidden"]
FLAGS += [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-DLSQ_EMULATOR",
]
SANITIZE = [
    "-DLSQ_SANITIZE",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]
# AddressSanitizer guards no variable that the linker may merge, such as those of inline functions
# and templates.
KERNEL_SANITIZE = [*SANITIZE, "-fwhole-program"]
# Every memory access calls the driver (races.cpp), in place of ThreadSanitizer's own library.
KERNEL_WATCH = ["-fsanitize=thread", "-nodefaultlibs"]
# For counts: scalar, unrolled code, similar to a GPU's, that calls the driver at each basic block.
KERNEL_PROFILE = [*KERNEL_WATCH, "-O3", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"]
KERNEL_PROFILE += ["--param", "max-completely-peeled-insns=4000", "-fsanitize-coverage=trace-pc"]
KERNEL_PROFILE += ["-Wno-maybe-uninitialized", "-Wno-sign-compare"]  # of unrolled loops
# No start files: the shared variables must be the only ones in zeroed memory (.bss) of a module.
KERNEL_LINK = ["-shared", "-nostartfiles"]
KERNEL_LIBRARIES = ["-lstdc++", "-lm", "-lgcc_s", "-lc"]

_DYNAMIC_SHARED = re.compile(
    r"\bextern\s+__shared__\s+(?:alignas\s*\([^)]*\)\s*)?([^;\[\]]*?)(\w+)\s*\[\s*\]\s*;"
)
_STATIC_SHARED = re.compile(r"\b__shared__\b")


def build_driver(sanitize: bool = False) -> Path:
    """Build the emulated libcuda unless it is cached; return its path. `sanitize`: with
    AddressSanitizer and UndefinedBehaviorSanitizer, for a process that preloads them. Raises
    RuntimeError: there is no compiler, the build failed, or the cache folder cannot be written."""
    return _build_library(
        "libemulated_cuda", tuple(SOURCES / name for name in DRIVER_SOURCES), sanitize
    )


def build_products(sanitize: bool = False) -> Path:
    """Build the emulated libcublasLt unless it is cached; return its path. Args and Raises as
    `build_driver`."""
    parts = tuple(SOURCES / name for name in PRODUCTS_SOURCES)
    return _build_library("libemulated_cublasLt", parts, sanitize, (build_driver(sanitize),))


def compile_kernels(
    source: str,
    defines: tuple[tuple[str, int], ...],
    sanitize: bool = False,
    *,
    profile: bool = False,
) -> bytes:
    """Compile a kernel source for the emulated driver unless it is cached.

    Args:
        source: file name in lsq/csrc/cuda ("activation.cu"), or a path elsewhere.
        defines: (name, value) of each preprocessor definition.
        sanitize: the same as in the `build_driver` whose driver loads the module.
        profile: count instructions, for lsq.emulator.profile.

    Returns:
        The module image for cuModuleLoadData.

    Raises:
        FileNotFoundError: there is no such source.
        RuntimeError: there is no compiler, the build failed, or the cache folder cannot be written.
    """
    path = KERNELS / source
    driver = build_driver(sanitize)
    checks = KERNEL_SANITIZE if sanitize else KERNEL_PROFILE if profile else KERNEL_WATCH
    flags = [*FLAGS, *checks, *(f"-D{name}={value}" for name, value in defines)]
    operations = _operations()
    includes = [f"-I{folder}" for folder in (KERNELS, SHARED, SOURCES, operations.parent)]
    beside = [] if path.parent == KERNELS else sorted(path.parent.glob("*.cuh"))
    headers = [*_headers(), *sorted(KERNELS.glob("*.cuh")), *beside, operations]
    target = _target(path.stem, [path, *headers], [*flags, *KERNEL_LINK, os.fspath(driver)])
    if not target.exists():
        text = _declare_shared(
            _run([*_compiler(), *flags, *includes, "-x", "c++", "-E", os.fspath(path)])
        )
        libraries = [os.fspath(driver), *KERNEL_LIBRARIES]
        _link(
            [*flags, *KERNEL_LINK, "-x", "c++-cpp-output", "-", "-x", "none", *libraries],
            target,
            text,
        )
    return MAGIC + os.fsencode(target) + b"\0"


def _build_library(
    stem: str, sources: tuple[Path, ...], sanitize: bool, libraries: tuple[Path, ...] = ()
) -> Path:
    flags = [*FLAGS, *(SANITIZE if sanitize else []), "-shared"]
    linked = list(map(os.fspath, libraries))
    target = _target(stem, [*sources, *_headers()], [*flags, *linked])
    if not target.exists():
        _link([*flags, f"-I{SHARED}", *map(os.fspath, sources), *linked, "-ldl"], target)
    return target


def _headers() -> list[Path]:
    """Return those of the emulator: a process that runs has one driver, whatever becomes of the
    kernels' headers."""
    return [
        *sorted(SOURCES.glob("*.h")),
        *sorted(SHARED.glob("*.h")),
    ]


def _operations() -> Path:
    """Return the path of operations.h, in its own folder of the cache."""
    text = sources.operations_header().encode()
    path = cache.folder("emulator").absolute() / f"operations-{cache.digest(text)}" / "operations.h"
    if not path.exists():
        cache.write(path, text)
    return path


def _target(stem: str, sources: list[Path], flags: list[str]) -> Path:
    """Return the path of the library of `sources` and `flags`; its name has a hash of all
    inputs."""
    parts = [part for path in sources for part in (path.name, path.read_bytes())]
    name = cache.digest(repr(flags), _compiler_version(tuple(_compiler())), *parts)
    return cache.folder("emulator").absolute() / f"{stem}-{name}.so"


def _compiler() -> list[str]:
    """Return the C++ compiler's command line: the environment variable CXX, else g++."""
    return shlex.split(os.environ.get("CXX") or "g++")


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


def _declare_shared(text: str) -> str:
    """Declare shared memory in C++: dynamic memory as a pointer, the rest as static variables."""
    dynamic = r"[[maybe_unused]] \1* const \2 = reinterpret_cast<\1*>(emulator_dynamic_shared);"
    # used: the emulator writes to it before each block, which the compiler does not see.
    return _STATIC_SHARED.sub("static __attribute__((used))", _DYNAMIC_SHARED.sub(dynamic, text))


def _link(arguments: list[str], target: Path, text: str | None = None) -> None:
    """Link `target` and move it into place at once, since other processes may build or use it now.
    Raises RuntimeError: the compiler is missing or fails, or the cache folder cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / target.name
        _run([*_compiler(), *arguments, "-o", os.fspath(staged)], text)
        try:
            cache.write(target, staged.read_bytes())
        except OSError as error:
            raise RuntimeError(
                f"the emulator's cache folder {target.parent} cannot be written ({error.strerror}):"
                " make it writable, or name another folder in XDG_CACHE_HOME"
            ) from error


def _run(command: list[str], text: str | None = None) -> str:
    """Run a compiler command with `text` as its input; log warnings and return the output. Raises
    RuntimeError: the command is missing or fails; the message has the compiler's errors."""
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            f"the C++ compiler {command[0]!r} cannot be run ({error.strerror}); the CUDA emulator"
            " needs one: install g++ (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install"
            " gcc-c++`), or name another in CXX"
        ) from error
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr.strip()[:4000]}")
    if result.stderr:
        logger.warning("%s", result.stderr.strip()[:4000])
    return result.stdout
