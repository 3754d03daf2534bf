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
"""Flags of Linux's /proc/cpuinfo that matter here, and their names."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction-set flags as Linux names them; empty where /proc/cpuinfo does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.split(":", 1)[1].split())


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model name, or the nearest that the system tells."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
