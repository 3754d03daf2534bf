"""The CPU's name and features."""

import functools
import platform
from pathlib import Path

CPU_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX BF16",
    "asimddp": "Arm dot product",
    "i8mm": "Arm int8 matrix multiply",
    "bf16": "Arm BF16",
    "sve": "Arm SVE",
}
"""Flags of Linux's /proc/cpuinfo that lsq uses or reports -> their names."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the instruction-set flags as Linux names them; none if /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.split(":", 1)[1].split())


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name, or else what the system calls the processor."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
