"""The emulator's compiler: what is cached, what is built again, and what is said when building
fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lsq.emulator import build

ROOT = Path(__file__).parents[2]
SOURCE = """\
#include "emulation.h"
extern "C" __global__ void fill(float* out) { out[threadIdx.x] = VALUE; }
LSQ_EXPORT(fill)
"""

SHORT = ("fibers.cpp",)
"""The part of the driver that compiles in no time; nothing is launched here."""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE + f"// {path}\n")
    return path


def built(image):
    """Path of the library that a module image names."""
    assert image.startswith(build.MAGIC) and image.endswith(b"\0")
    return Path(os.fsdecode(image[len(build.MAGIC) : -1]))


def test_what_is_cached_is_not_compiled_again(source, monkeypatch):
    first = build.compile_kernels(str(source), (("VALUE", 1),))
    assert built(first).exists()
    monkeypatch.setattr(build, "_run", lambda *_: pytest.fail("compiled again"))
    assert build.compile_kernels(str(source), (("VALUE", 1),)) == first


def test_what_changed_is_compiled_again(source):
    images = {
        build.compile_kernels(str(source), (("VALUE", 1),)),
        build.compile_kernels(str(source), (("VALUE", 2),)),
    }
    source.write_text(SOURCE + "// changed\n")
    images.add(build.compile_kernels(str(source), (("VALUE", 1),)))
    (source.parent / "beside.cuh").write_text("// a header that it could include")
    images.add(build.compile_kernels(str(source), (("VALUE", 1),)))
    assert len(images) == 4


def test_what_cannot_be_compiled(source, tmp_path):
    with pytest.raises(RuntimeError, match=r"fill.cu:2:\d+: error: .*VALUE"):
        build.compile_kernels(str(source), ())
    with pytest.raises(FileNotFoundError, match="absent.cu"):
        build.compile_kernels("absent.cu", ())


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="'no-such-compiler' cannot be run.*install g.. .*CXX"):
        build.compile_kernels(str(source), (("VALUE", 1),))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "DRIVER_SOURCES", SHORT)
    with pytest.raises(
        RuntimeError, match=f"{tmp_path}/file/lsq/emulator cannot be written .*XDG_CACHE_HOME"
    ):
        build.build_driver()


def test_several_processes_build_at_once(source, tmp_path):
    code = f"from lsq.emulator import build\nbuild.DRIVER_SOURCES = {SHORT}\n"
    code += f"print(build.compile_kernels({str(source)!r}, (('VALUE', 1),)))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    images = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0, 0] and len(images) == 1
    kept = [
        path.stem.partition("-")[0] for path in (tmp_path / "cache" / "lsq" / "emulator").iterdir()
    ]
    assert sorted(kept) == ["fill", "libemulated_cuda", "operations"]
