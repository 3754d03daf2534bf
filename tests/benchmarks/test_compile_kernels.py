"""Other versions of NVRTC than the installed one."""

import os
import re
from pathlib import Path

import compile_kernels
import pytest

from lsq.native import compiler
from lsq.native.compiler import Resources
from lsq.native.launch import Kernel

KERNELS = [
    Kernel(source="rounding.cu", name="lsq_round", defines=(("FLOAT", 1),)),
    Kernel(source="scales.cu", name="lsq_start_scales"),
]
OTHERS = "LSQ_TEST_NVRTC"
"""Environment variable with the paths of libnvrtc.so of other versions, e.g. of
`pip download nvidia-cuda-nvrtc-cu12==12.8.*`, unpacked."""


@pytest.fixture(autouse=True)
def installed():
    try:
        compiler.version()
    except RuntimeError as error:
        pytest.skip(str(error))


def test_kernels_of_a_version_are_summed_up(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")  # it is set again
    monkeypatch.setattr(compile_kernels, "needed", lambda *given, **named: KERNELS)
    rows, spilling = compile_kernels.by_library(None, ["sm_80", "sm_90a"])
    assert not spilling
    for row, target in zip(rows, ("sm_80", "sm_90a"), strict=True):
        assert re.fullmatch(rf"\| {compiler.version()} \| {target} \| 2 \| 0 \| \d+ \| \d+ \|", row)


def test_kernels_that_spill_are_named_with_the_version(monkeypatch):
    def spilling(wanted, targets):
        taken = Resources(registers=255, spill_bytes=8, stack_bytes=8, shared_bytes=0)
        return {(str(kernel), targets[0]): taken for kernel in wanted}

    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    monkeypatch.setattr(compile_kernels, "needed", lambda *given, **named: KERNELS)
    monkeypatch.setattr(compile_kernels, "report", spilling)
    rows, found = compile_kernels.by_library(None, ["sm_80"])
    assert rows == [f"| {compiler.version()} | sm_80 | 2 | 2 | 255 | 0 |"]
    by = f"bytes on sm_80 by NVRTC {compiler.version()}"
    assert found == [f"{kernel} spills 8 {by}" for kernel in KERNELS]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(OTHERS not in os.environ, reason=f"{OTHERS} names no other NVRTC")
def test_no_kernel_spills_by_another_version():
    libraries = [Path(library) for library in os.environ[OTHERS].split(os.pathsep)]
    table, spilling = compile_kernels.compare(libraries, ["sm_90a"])
    assert not spilling
    versions = set(re.findall(r"^\| (\d+\.\d+) ", table, re.MULTILINE))
    assert len(versions) == 1 + len(set(libraries))
