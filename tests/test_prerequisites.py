"""What `make venv` needs: found missing before anything is downloaded, and named alike in all
files."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prerequisites

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ["{}.{}".format(*version) for version in prerequisites.TRIED]
APT = ("make", "git", "g++", "python3", "python3-venv", "python3-dev")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0), (4, 0)])
def test_other_pythons_are_refused(version):
    said = prerequisites.unsuitable(version)
    assert (
        f"is Python {'.'.join(map(str, version))}, but lsq runs in 3.11, 3.12 and 3.13 alone"
        in said
    )
    assert "make PYTHON=" in said and "\n" not in said


def test_pythons_that_were_tried():
    assert all(prerequisites.unsuitable((*version, 7)) is None for version in prerequisites.TRIED)


@needs_compiler
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["g++"], None),
        (["/nonexistent/g++"], "/nonexistent/g++ cannot be run (No such file or directory)"),
        (["g++", "-std=c++1917"], "g++ cannot build a library of C++17 with OpenMP: "),
    ],
)
def test_compilers(command, words):
    said = prerequisites.compiler_fault(command)
    assert said is None if words is None else said.startswith(words) and "\n" not in said


def test_everything_missing_is_named_with_one_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert prerequisites.main() == 1
    said = capsys.readouterr().err.splitlines()
    python = "python{}.{}".format(*sys.version_info)
    assert all(
        word in line for word, line in zip(("g++", "ensurepip", "Python.h"), said[1:4], strict=True)
    )
    assert said[4:] == [f"Debian, Ubuntu: sudo apt install g++ {python}-venv {python}-dev"]


@needs_compiler
def test_nothing_is_said_where_all_is_there(monkeypatch, tmp_path, capsys):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert prerequisites.main() == 0 and capsys.readouterr() == ("", "")


@pytest.fixture
def make(tmp_path):
    """make(*words, **environment) runs `make venv` for tmp_path / "venv"."""
    tool = shutil.which("make")
    if tool is None:
        pytest.skip("needs make")

    def make(*words: str, **environment: str) -> subprocess.CompletedProcess:
        command = [tool, "venv", f"VENV={tmp_path / 'venv'}", "PIP_OPTIONS=--no-index", *words]
        environment = environment or dict(os.environ)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return make


def test_make_stops_before_it_downloads(make, tmp_path):
    done = make(f"PYTHON={sys.executable}", **os.environ | {"CXX": "/nonexistent/g++"})
    assert done.returncode == 2 and "apt install g++" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_takes_no_python_that_was_not_tried(make, tmp_path):
    """The check says what is wrong with python3, where there is one."""
    done = make(PATH=str(tmp_path))
    assert done.returncode == 2
    assert "No python3 was found. Debian, Ubuntu: apt install" in done.stderr
    other = tmp_path / "python3"
    other.write_text('#!/bin/sh\n[ "$1" = prerequisites.py ] && echo asked >&2\nexit 1\n')
    other.chmod(0o755)
    done = make(PATH=str(tmp_path))
    assert done.returncode == 2 and "asked" in done.stderr.splitlines()
    assert not (tmp_path / "venv").exists()


@needs_compiler
def test_make_clears_no_environment_of_somebody_else(make, tmp_path):
    """One that suits would be used; this one has no pip."""
    theirs = tmp_path / "venv" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("#!/bin/sh\nexit 1\n")
    theirs.chmod(0o755)
    done = make(f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert "is not of this make" in done.stderr and "move it away" in done.stderr
    assert theirs.exists()


def test_all_files_name_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest, newest) = prerequisites.TRIED[0], prerequisites.TRIED[-1]
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    page = " ".join((ROOT / "docs/start.md").read_text().split())
    assert f"apt install {' '.join(APT)}" in page
    assert f"Python {', '.join(VERSIONS[:-1])} or {VERSIONS[-1]}" in page
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"python{version}" in makefile for version in VERSIONS)


def test_nothing_that_torch_requires_exactly_is_constrained():
    """PyTorch's standard build pins NVIDIA's packages and triton; its builds for the CPU do not say
    so."""
    names = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "torch" in names
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-")) or name == "triton"]
