"""Where each number of the model of GPUs is from: a data sheet, somebody's measurement, or nowhere,
which makes it an assumption."""

from collections.abc import Mapping
from dataclasses import fields

import gpu_model
import gpu_opponents
from gpu_model import GIGA, GPUS, MICRO, TERA, Gpu, variant

from lsq.emulator.profile import Limits

SHEET = "data sheet"
GUIDE = "CUDA C++ Programming Guide, limits and arithmetic throughput by compute capability"
GUIDE_AND_SHEET = f"{GUIDE}; tensor: {SHEET}"
ASSUMED = "assumed"
L2 = "measured: github.com/te42kyfo/gpu-benches, gpu-l2-cache"
"""The benchmark's results are files of this folder."""
ONE_H100 = "measured: seen on one H100 80GB HBM3, PyTorch 2.11"
SIZES_4090 = "measured: zzc0721/torch-performance-test-data, issue 78"
A100_BF16 = "measured: triton-lang/triton, issue 4876"

FIELDS = {
    "multiprocessors": (SHEET, 1),
    "gigahertz": (f"{ASSUMED}: under load, below the {SHEET}'s boost clock", 1),
    "memory": (f"{SHEET}, TB/s", TERA),
    "copying": (f"H100: {ONE_H100}; others: {ASSUMED}", 1),
    "l2_bytes": (f"{SHEET}, MB", 1e6),
    "l2": (
        f"TB/s; {L2}: A100 5.4, L40 (the chip of the 4090, with more multiprocessors) 5.2, H100"
        " PCIe 6.9, H200 (the chip of the H100) 9.8",
        TERA,
    ),
    "bfloat16": (f"{SHEET}, dense, TFLOP/s", TERA),
    "int8": (f"{SHEET}, dense, TOP/s", TERA),
    "bfloat16_reached": (f"A100: {A100_BF16}; 4090: {SIZES_4090}; H100: {ONE_H100}", 1),
    "int8_reached": (
        f"{ASSUMED}; the 4090's from an RTX 4070 Super, 0.7 in a product of two waves"
        " (hibagus/CUDA_Bench, issue 2), and an RTX 5090, 0.66 at 400 W (gau-nernst/learn-cuda,"
        " 08_row_scaled_mm)",
        1,
    ),
    "limits": (GUIDE, 1),
    "lanes": (GUIDE_AND_SHEET, 1),
    "mma": (f"{ASSUMED}: what mma.sync reaches of wgmma on Hopper", 1),
    "wgmma": (
        f"{ASSUMED}; measured in bfloat16, of cuBLAS: 0.80 with warps that only copy, by TMA, and"
        " tiles of 128 x 256 (github.com/pranjalssh/fast.cu); lsq's copy by cp.async",
        1,
    ),
    "multicast": (f"{ASSUMED}: clusters of two blocks with tiles of 128 x 256, as in fast.cu", 1),
    "reached": (ASSUMED, 1),
    "integers": (f"{ASSUMED}; PTX of some kernels has 0.2 to 0.95 of g++'s", 1),
    "gap": (f"{ASSUMED}, microseconds, without a CUDA graph", MICRO),
    "overlapped": (f"{ASSUMED}: programmatic dependent launch hides the start, not the end", 1),
    "past_l1": (ASSUMED, 1),
    "beside": (f"{ASSUMED}: two blocks that start together may stay together, or part", 1),
    "kept": (f"{ASSUMED}; {L2}: 0.7 (A100, H100 PCIe) to 0.95 (L40) of one array", 1),
}
"""Number of `Gpu` -> (where it is from, its unit)."""
OTHERS = {
    "TILES": (gpu_model.TILES, f"{ASSUMED}; 128 x 64 from a product of 1,024 ({SIZES_4090})"),
    "RAMP": (gpu_model.RAMP, ASSUMED),
    "ONE_WARPGROUP": (f"{gpu_model.ONE_WARPGROUP:.2f}", f"{ASSUMED}: four warps instead of eight"),
    "LATENCY": (f"{gpu_model.LATENCY * GIGA:.0f} ns", ASSUMED),
    "IN_FLIGHT": (f"{gpu_model.IN_FLIGHT} bytes", f"{ASSUMED}: two loads of 16 bytes by each lane"),
    "SLOTS": ("by instruction", f"{GUIDE}; division, root, logarithm: {ASSUMED}"),
    "opponents": (
        "ideal",
        f"{ASSUMED}: each operand read once, one kernel between products, no host, no overhead",
    ),
    "ADAM": (
        f"{gpu_opponents.ADAM} bytes a parameter",
        "PyTorch's fused Adam on float32 copies, by its operands",
    ),
    "instructions, sectors": ("counted", "lsq.emulator.profile, at few tokens; registers: NVRTC"),
}
"""Further numbers -> (value, where it is from)."""


def rows() -> list[dict[str, str]]:
    """A line for each number: its value on each GPU, with the worst and best if that is unsure."""
    found = []
    for field in fields(Gpu):
        if field.name in ("name", "target"):
            continue
        source, unit = FIELDS[field.name]
        values = {gpu.name: shown(gpu, field.name, unit) for gpu in GPUS}
        found.append({"number": field.name, **values, "source": source})
    for name, (value, source) in OTHERS.items():
        found.append({"number": name, **{gpu.name: str(value) for gpu in GPUS}, "source": source})
    return found


def shown(gpu: Gpu, name: str, unit: float) -> str:
    """A number of a GPU, with its worst and best value where they differ."""
    value, worst, best = (getattr(one, name) for one in (gpu, variant(gpu, -1), variant(gpu, 1)))
    if isinstance(value, Limits):
        value = vars(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if worst == value == best:
        return f"{value / unit:.4g}"
    return f"{value / unit:.4g} ({worst / unit:.3g} to {best / unit:.3g})"


def markdown() -> str:
    """The table."""
    lines = rows()
    names = list(lines[0])
    cells = [names, ["---"] * len(names), *([line[name] for name in names] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
