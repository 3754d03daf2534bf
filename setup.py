"""Builds the C++ host libraries with a C++ compiler and nothing else: the CPU's loops, once for
each x86-64 level, and the launcher that replays work on a GPU.

The libraries have a plain C interface and are loaded with ctypes; lsq/native/loader.py picks the
level that the CPU can run. If there is no compiler, or compiling fails, the installation goes on
and plain torch is used. pyproject.toml has everything else about the package.
"""

import hashlib
import os
import platform
import runpy
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

STAMPED = str(Path("lsq/csrc/sources.cpp"))
"""The source that is compiled with its library's checksum, for lsq/native/sources.py."""

_module = runpy.run_path("lsq/native/sources.py")
checksum, sealed, unsealed = _module["checksum"], _module["sealed"], _module["unsealed"]
HEADERS = [str(path) for folder in ("cpu", "runtime") for path in _module["headers"](folder)]


def write_operations() -> Path:
    """Write operations.h if it has changed since the last build; return its path."""
    path, text = Path("build/generated/operations.h"), _module["operations_header"]()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


OPERATIONS = write_operations()
HEADERS.append(str(OPERATIONS))


def sources(folder: str) -> list[str]:
    """Return the .cpp files of the library in lsq/csrc/`folder`."""
    return [*sorted(str(path) for path in Path("lsq/csrc", folder).glob("*.cpp")), STAMPED]


# -ffp-contract=off: no fused multiply-adds, so that every level rounds exactly like the reference.
COMPILE_FLAGS = ["-O3", "-std=c++17", "-Wall", "-fPIC", "-fopenmp"]
COMPILE_FLAGS += [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    f"-I{OPERATIONS.parent}",
]
LINK_FLAGS = ["-shared", "-fopenmp", "-ldl"]
X86_LEVELS = {
    "libcpu_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "libcpu_v3": ["-march=x86-64-v3"],
    "libcpu_v1": [],
}
LEVELS = X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {"libcpu_v1": []}
LIBRARIES = {
    **{name: ("cpu", flags) for name, flags in LEVELS.items()},
    "libruntime": ("runtime", []),
}
"""Name of a library -> (folder of its sources, compiler flags)."""

ADVICE = """\
lsq: The installation goes on. A library that is missing is replaced by plain torch, which is
    slower.
lsq: To build it, install a C++17 compiler with OpenMP (Debian, Ubuntu: `apt install g++`; Fedora:
lsq: `dnf install gcc-c++`; any other: name it in CXX) and install lsq again. `lsq doctor` says what
    runs."""


def compiler() -> list[str]:
    """Return the C++ compiler's command line: the environment variable CXX, else g++."""
    return shlex.split(os.environ.get("CXX") or "g++")


def made_from(command: list[str], paths: list[str]) -> bytes:
    """Return the SHA-256 of a file's inputs: command line, names and contents of `paths`."""
    digest = hashlib.sha256(repr(command).encode())
    for path in paths:
        digest.update(repr((path, Path(path).read_bytes())).encode())
    return digest.digest()


def is_current(target: Path, digest: bytes) -> bool:
    """Return whether `target` is whole and its inputs have this digest, whatever its age."""
    return target.exists() and unsealed(target.read_bytes()).endswith(digest)


def execute(command: list[str]) -> None:
    """Run one compiler command. Raises RuntimeError: it is missing or fails; the message says
    why."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            f"the C++ compiler {command[0]!r} cannot be run ({error.strerror})"
        ) from error
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr.strip()[-2000:]}")


def compiled(source: str, flags: list[str], objects: Path) -> Path:
    """Return the object file of `source` in `objects`; compile it if it is missing, and remove
    older ones.

    Its name ends with the digest of its inputs, so that neither file times nor another checkout
    mislead. Raises RuntimeError: the compiler is missing or fails.
    """
    command = [*compiler(), *COMPILE_FLAGS, *flags, "-c", source]
    stem = Path(source).stem
    made = objects / f"{stem}.{made_from(command, [source, *HEADERS]).hex()}.o"
    if not made.exists():
        staged = objects / f"{stem}.partial"
        execute([*command, "-o", str(staged)])
        for outdated in objects.glob(f"{stem}.*.o"):
            outdated.unlink()
        staged.replace(made)
    return made


def build_library(
    target: Path, flags: list[str], objects: Path, sources: list[str], checksum: int = 0
) -> None:
    """Compile what has changed and link `target`, replacing it in one step: a running process may
    have it mapped.

    The digest of its inputs is appended, by which the next build knows whether it is current, and
    then the checksum of it all, by which lsq/native/sources.py finds damage before it loads the
    library.

    Args:
        target: the shared library to make.
        flags: compiler flags of this instruction-set level.
        objects: folder for object files, kept between builds.
        sources: paths of the .cpp files.
        checksum: of all sources; `STAMPED` is compiled with it.

    Raises:
        RuntimeError: the compiler is missing or fails. `target` is then removed: nothing outdated
            may run.
    """
    stamp = f"-DLSQ_SOURCES={checksum}u"
    digest = made_from(
        [*compiler(), *COMPILE_FLAGS, *flags, stamp, *LINK_FLAGS], [*sources, *HEADERS]
    )
    if is_current(target, digest):
        return
    print(f"lsq: compiling {target.name}, which may take two minutes", flush=True)
    start = time.perf_counter()
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(".partial")
    try:
        made = [
            compiled(source, [*flags, stamp] if source == STAMPED else flags, objects)
            for source in sources
        ]
        execute([*compiler(), *map(str, made), *LINK_FLAGS, "-o", str(staged)])
        staged.write_bytes(sealed(staged.read_bytes() + digest))
    except RuntimeError:
        target.unlink(missing_ok=True)
        raise
    staged.replace(target)
    print(f"lsq: compiled {target.name} in {time.perf_counter() - start:.0f} s", flush=True)


class BuildLibraries(build_ext):
    """`build_ext` for libraries that Python does not import: no suffix or PyInit symbol of
    Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        """Build every library, into the source tree if in place or editable, else the build
        folder."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = list(filter(None, pool.map(self.failure, self.extensions)))
        if failures:
            print(*failures, ADVICE, sep="\n", file=sys.stderr)

    def failure(self, extension: Extension) -> str | None:
        """Build one library; return the message that says why it was not built, or None."""
        root = Path() if self.inplace else Path(self.build_lib)
        target = root / self.get_ext_filename(extension.name)
        try:
            objects = Path(self.build_temp) / target.stem
            folder, flags = LIBRARIES[target.stem]
            build_library(target, flags, objects, extension.sources, checksum(folder))
        except RuntimeError as error:
            return f"lsq: {target} was not built: {error}"


class Wheel(bdist_wheel):
    """`bdist_wheel` for libraries that ctypes loads: one wheel fits every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(f"lsq.native.{name}", sources(folder), depends=HEADERS)
            for name, (folder, _) in LIBRARIES.items()
        ],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
    )
