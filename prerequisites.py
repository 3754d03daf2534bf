"""What this machine lacks for `make venv`, said before anything is downloaded.

    python3 prerequisites.py       run by make, with the interpreter that .venv is to be made from

Says nothing and exits with 0 where all is there. Older Pythons (from 3.6) can run this far enough
to be told that they do not suit.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile

TRIED = ((3, 11), (3, 12), (3, 13))
"""The versions of Python that the tests pass with; requires-python of pyproject.toml spans them.
fairseq cannot be imported in 3.14, whose argparse refuses its option types.
"""
PROGRAM = (
    "#include <omp.h>\n#include <vector>\nstd::vector<int> threads() { return"
    " {omp_get_max_threads()}; }\n"
)


def unsuitable(version):
    """Why a Python of that version (major, minor, ...) cannot run lsq, in one line; None if it
    can."""
    if tuple(version[:2]) in TRIED:
        return None
    given = ".".join(map(str, version[:3]))
    *others, last = ("{}.{}".format(*tried) for tried in TRIED)
    return (
        f"{sys.executable} is Python {given}, but lsq runs in {', '.join(others)} and {last} alone"
        " (fairseq fails in"
        " 3.14): install one of them, with its venv module and headers, and name it: make"
        " PYTHON=/path/to/python"
    )


def compiler_fault(command):
    """Why a C++ compiler cannot build lsq, in one line; None if it can.

    Args:
        command: its command line, a list.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "-x",
            "c++",
            "-std=c++17",
            "-fPIC",
            "-shared",
            "-fopenmp",
            "-",
            "-o",
            os.path.join(folder, "tried.so"),
        ]
        try:
            result = subprocess.run(
                [*command, *flags], input=PROGRAM, capture_output=True, text=True
            )
        except OSError as error:
            return f"{command[0]} cannot be run ({error.strerror})"
    if result.returncode:
        said = (result.stderr.strip() or "it says nothing").splitlines()[0]
        return f"{command[0]} cannot build a library of C++17 with OpenMP: {said}"
    return None


def missing():
    """What is missing: a list of (what it is and why it is counted as missing, Debian's package of
    it)."""
    python = "python{}.{}".format(*sys.version_info)
    found = []
    fault = compiler_fault(shlex.split(os.environ.get("CXX") or "g++"))
    if fault:
        found.append(("a C++ compiler: " + fault, "g++"))
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        found.append(
            ("venv and ensurepip, the modules that make virtual environments", python + "-venv")
        )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        found.append(
            ("Python.h, which fairseq is built with: there is no " + header, python + "-dev")
        )
    return found


def main():
    """Say what is missing. Returns the exit status: 1 if something is."""
    fault = unsuitable(sys.version_info)
    if fault:
        print(fault, file=sys.stderr)
        return 1
    found = missing()
    if found:
        print(f"{sys.executable} cannot set lsq up yet. Missing:", file=sys.stderr)
        for what, _ in found:
            print("  * " + what, file=sys.stderr)
        packages = " ".join(package for _, package in found)
        root = "" if os.geteuid() == 0 else "sudo "
        print(f"Debian, Ubuntu: {root}apt install {packages}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
