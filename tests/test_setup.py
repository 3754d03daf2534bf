"""The C++ build: what it makes, what it rebuilds, and that an installation survives a missing compiler."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lsq.csrc import sources

ROOT = Path(__file__).resolve().parents[1]
SOURCE = 'extern "C" int answer() { return %d; }\n'

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def build(monkeypatch):
    """The functions of setup.py, without running an installation."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CXX", raising=False)
    spec = importlib.util.spec_from_file_location("lsq_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE % 42)
    return path


def make_older(*paths: Path) -> None:
    """Date files a minute back, so that what is written next is newer whatever the clock's resolution."""
    for path in paths:
        then = path.stat().st_mtime - 60
        os.utime(path, (then, then))


@needs_compiler
def test_library_is_loadable(build, source, tmp_path):
    target = tmp_path / "out" / "libanswer.so"
    build.build_library(target, [], tmp_path / "objects", [str(source)])
    assert ctypes.CDLL(str(target)).answer() == 42
    assert not target.with_suffix(".partial").exists()
    assert sources.is_whole(target.read_bytes())


@needs_compiler
def test_only_what_changed_is_rebuilt(build, source, tmp_path):
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int other() { return 1; }\n')
    arguments = (tmp_path / "libanswer.so", [], tmp_path / "objects", [str(source), str(other)])
    build.build_library(*arguments)
    files = [arguments[0], arguments[2] / "answer.o", arguments[2] / "other.o"]
    first = [path.stat().st_mtime_ns for path in files]

    build.build_library(*arguments)
    assert [path.stat().st_mtime_ns for path in files] == first

    source.write_text(SOURCE % 43)
    os.utime(source, (first[0] / 1e9 + 1, first[0] / 1e9 + 1))
    build.build_library(*arguments)
    second = [path.stat().st_mtime_ns for path in files]
    assert [now != before for now, before in zip(second, first, strict=True)] == [True, True, False]
    assert ctypes.CDLL(str(arguments[0])).answer() == 43


@needs_compiler
def test_a_changed_header_rebuilds(build, source, tmp_path, monkeypatch):
    target, header = tmp_path / "libanswer.so", tmp_path / "answer.h"
    header.write_text("")
    monkeypatch.setattr(build, "HEADERS", [str(header)])
    make_older(source, header)
    build.build_library(target, [], tmp_path / "objects", [str(source)])
    assert build.is_current(target, [str(source)])
    later = target.stat().st_mtime + 1
    os.utime(header, (later, later))
    assert not build.is_current(target, [str(source)])


@needs_compiler
def test_a_failed_build_leaves_no_outdated_library(build, source, tmp_path):
    target = tmp_path / "libanswer.so"
    target.write_bytes(b"outdated")
    make_older(target)
    source.write_text("this is not C++")
    with pytest.raises(RuntimeError, match=r"answer\.cpp.*error"):
        build.build_library(target, [], tmp_path / "objects", [str(source)])
    assert not target.exists()


def test_missing_compiler_is_named(build, source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/compiler -v")
    with pytest.raises(RuntimeError, match="'/nonexistent/compiler' cannot be run"):
        build.build_library(tmp_path / "libanswer.so", [], tmp_path / "objects", [str(source)])


def test_installation_goes_on_without_a_compiler(tmp_path):
    result = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext"]
        + ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env=os.environ | {"CXX": "/nonexistent/compiler"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "libcpu_v1.so was not built" in result.stderr
    assert "'/nonexistent/compiler' cannot be run" in result.stderr
    assert "apt install g++" in result.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_levels_round_alike(build):
    """Fused multiply-adds would round differently on each level."""
    assert "-ffp-contract=off" in build.COMPILE_FLAGS
    assert "libcpu_v1" in build.LEVELS
    assert not any("fast-math" in flag for flags in build.LEVELS.values() for flag in flags)
