"""NVRTC: what it makes of kernels, what it reports, what is kept, and what is said when it is not
there."""

import functools
import logging
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lsq.native import cache, compiler
from lsq.native.launch import Kernel

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
DEFINES = (("FLOAT", 1),)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path, request):
    """An empty cache folder for each test, but for the one that compiles everything."""
    if "every_kernel" not in request.node.name:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_machine_code_and_its_report(target):
    compiled = compiler.compile_kernels("rounding.cu", DEFINES, target)
    assert compiled.image.startswith(b"\x7fELF")
    assert set(compiled.resources) == {"lsq_round"}
    taken = compiled.resources["lsq_round"]
    assert 8 < taken.registers < 256
    assert taken.spill_bytes == 0


def test_what_spills_is_reported(tmp_path):
    source = tmp_path / "hungry.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024) hungry(float* x) {\n'
        "    float held[96];\n#pragma unroll\n    for (int i = 0; i < 96; ++i) held[i] = x[i * 1024"
        " + threadIdx.x];\n    __syncthreads();\n#pragma unroll\n    for (int i = 0; i < 96; ++i)"
        " x[i * 1024 + threadIdx.x] = held[i] * held[(i * 7) % 96];\n}\n"
    )
    taken = compiler.compile_kernels(str(source), (), "sm_90a").resources["hungry"]
    assert taken.registers <= 64 and taken.spill_bytes > 0


def test_kept_machine_code_is_taken_and_damage_is_found(caplog):
    first = compiler.compile_kernels("rounding.cu", DEFINES, "sm_80")
    (kept,) = cache.folder("kernels").iterdir()
    changed = kept.stat().st_mtime_ns
    assert compiler.compile_kernels("rounding.cu", DEFINES, "sm_80") == first
    assert kept.stat().st_mtime_ns == changed
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert compiler.compile_kernels("rounding.cu", DEFINES, "sm_80") == first
    assert "is damaged; it is made again" in caplog.text
    assert kept.read_bytes() != content


def test_a_folder_that_cannot_be_written_is_named_once(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert compiler.compile_kernels("rounding.cu", DEFINES, "sm_80").image
    assert caplog.text.count("cannot be kept in") == 1
    assert "XDG_CACHE_HOME" in caplog.text


def test_a_changed_header_makes_new_code(monkeypatch):
    compiler.compile_kernels("rounding.cu", DEFINES, "sm_80")
    monkeypatch.setattr(compiler, "device_headers", lambda: "other")
    compiler.compile_kernels("rounding.cu", DEFINES, "sm_80")
    assert len(list(cache.folder("kernels").iterdir())) == 2


def test_what_does_not_compile_is_named(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong() { absent(); }\n')
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile .*wrong.cu(.|\n)*absent"):
        compiler.compile_kernels(str(source), (), "sm_80")


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler._nvrtc.cache_clear()
    with pytest.raises(RuntimeError, match=r"NVRTC.*cannot be used.*pip install .*\[cuda13\]'"):
        compiler.compile_kernels("rounding.cu", DEFINES, "sm_80")
    compiler._nvrtc.cache_clear()


@pytest.mark.parametrize(
    "capability, target",
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100")],
)
def test_targets(capability, target):
    assert compiler.architecture(capability) == target


def test_an_old_gpu_is_refused():
    with pytest.raises(
        ValueError, match=r"compute capability 7.5; lsq's CUDA kernels need 8.0 \(Ampere\) or newer"
    ):
        compiler.architecture((7, 5))


def test_a_driver_older_than_the_compiler_is_refused():
    compiler.check_driver((13, 0))
    with pytest.raises(
        RuntimeError, match="driver supports CUDA 12.4, but kernels are compiled by NVRTC 13"
    ):
        compiler.check_driver((12, 4))


@functools.cache
def needed_kernels() -> list[Kernel]:
    """Of transformer base and big, with activations in bfloat16."""
    return import_module("compile_kernels").needed(dtypes=[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_kernel_of_base_and_big_compiles_without_spills(target, monkeypatch):
    """For sm_86 NVRTC makes what it makes for sm_89."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    compile_kernels = import_module("compile_kernels")
    wanted = needed_kernels()
    names = {kernel.name for kernel in wanted}
    assert names >= {
        "lsq_round_weight",
        "lsq_start_scales",
        "lsq_finish_sums",
        "lsq_adam_codes_table",
    }
    found = compile_kernels.report(wanted, [target])
    assert found and not compile_kernels.spills(found)
