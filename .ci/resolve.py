"""Resolves what `make venv` installs, for every Python that lsq was tried with, against PyTorch's
standard build.

Machines that have the CPU build at hand install without seeing what the standard build requires of
other packages. Only metadata is read, from the index that pip is set to; nothing is taken from a
cache, so that no index is an error.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from prerequisites import TRIED  # noqa: E402

TO_BUILD = "cython\nsetuptools\n"
"""What the Makefile installs beside the project's own requirements."""
STANDARD = "cuda-toolkit=="
"""How a line begins that only the standard build brings about."""


def index() -> str | None:
    """The package index that pip is set to; None for its own."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or found or None


def resolve(python: str, constraints: Path, cache: str) -> str:
    """The packages and versions that a Python of that version would get, a line each.

    Raises:
        RuntimeError: there is no resolution, no index, or no standard build of PyTorch; the message
            says which.
    """
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--cache-dir",
        cache,
    ]
    command += ["--system-certs", "--no-header", "--no-annotate", "--constraints", str(constraints)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command += [
        "--extra",
        "dev",
        *(["--default-index", index()] if index() else []),
        "pyproject.toml",
        "-",
    ]
    done = subprocess.run(command, cwd=ROOT, input=TO_BUILD, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"the requirements do not resolve for Python {python}:\n{done.stderr.strip()}"
        )
    if not any(line.startswith(STANDARD) for line in done.stdout.splitlines()):
        raise RuntimeError(
            f"the index has not PyTorch's standard build for Python {python}, but:\n{done.stdout}"
        )
    return done.stdout


def main() -> int:
    """Resolve for each Python, under the constraints file named, else the project's.

    Returns the exit status.
    """
    constraints = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "constraints.txt").resolve()
    with tempfile.TemporaryDirectory() as cache:
        for version in TRIED:
            python = "{}.{}".format(*version)
            try:
                resolved = resolve(python, constraints, cache)
            except RuntimeError as error:
                print(f"resolve.py: error: {error}", file=sys.stderr)
                return 1
            print(f"Python {python}: {len(resolved.splitlines())} packages", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
