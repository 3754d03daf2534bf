"""`lsq doctor`: report this machine's features, its int8 path, and what to install for more."""

import os
import platform
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from importlib import metadata

import torch

import lsq
from lsq import gemm
from lsq.commands.options import command_parser
from lsq.extras import EXTRAS, REQUIRED
from lsq.native import loader, processor, runtime, tiles
from lsq.native.sources import LibraryError
from lsq.run.cuda import gpu_fault

INT8_FEATURES = {
    "AVX-VNNI",
    "AVX-512 VNNI",
    "AMX int8",
    "Arm dot product",
    "Arm int8 matrix multiply",
}
"""CPU features that multiply int8 faster than floats."""


class Options(Namespace):
    """Say what this machine can do, which int8 path runs here, and what to install for more."""


@dataclass(frozen=True, kw_only=True)
class ProductCheck:
    """An int8 product [M, K] times [N, K] transposed, checked, and timed against float32."""

    exact: bool
    shape: tuple[int, int, int]  # M, N, K
    int8_milliseconds: float
    float32_milliseconds: float

    @property
    def speedup(self) -> float:
        return self.float32_milliseconds / self.int8_milliseconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """Hardware, libraries and packages of this machine, and a checked int8 product."""

    cpu: str
    cores: int
    threads: int
    cpu_features: tuple[str, ...]  # empty where the system hides them
    gpus: tuple[str, ...]
    cuda: str | None
    """Version of CUDA that torch is built for; None: it is built for the CPU alone."""
    gpu_fault: str | None
    """Reason why layers cannot compute on the first GPU; None: they can."""
    host_library: str | None
    """Description of the C++ library, which runs the fused loops; None: plain torch runs them."""
    faults: dict[str, str]
    """Library that was built but cannot be used -> why, and what to do."""
    packages: dict[str, str | None]
    """Required or optional package -> its version; None: it is not installed."""
    product: ProductCheck

    @property
    def missing(self) -> list[str]:
        return [name for name in REQUIRED if not self.packages[name]]

    @property
    def healthy(self) -> bool:
        """Whether training works."""
        return self.product.exact and not self.faults and not self.missing

    @property
    def on_gpu(self) -> bool:
        return bool(self.gpus) and not self.gpu_fault

    @property
    def advice(self) -> tuple[str, ...]:
        """Recommendations to the user, most important first."""
        no_int8 = self.cpu_features and not INT8_FEATURES.intersection(self.cpu_features)
        slow = not no_int8 and self.product.speedup < 1 and not self.on_gpu
        checks = [
            (
                not self.product.exact,
                "int8 products are wrong on this machine: do not train in int8 here. Another"
                " version of torch may be right; please report the CPU and the versions above.",
            ),
            *((True, f"The {name} cannot be used: {fault}") for name, fault in self.faults.items()),
            (self.missing, f"Required packages are missing: pip install {' '.join(self.missing)}"),
            (self.gpus and self.gpu_fault, f"The GPU cannot be used: {self.gpu_fault}"),
            (
                self.host_library is None,
                "The C++ library is missing, so plain torch runs the fused loops, slower. Install a"
                " C++17 compiler with OpenMP (Debian, Ubuntu: apt install g++; Fedora: dnf install"
                " gcc-c++) and install lsq again (in a clone: make library).",
            ),
            (
                no_int8,
                "This CPU has no int8 dot-product instructions: int8 training works, but a CPU with"
                " AVX-512 VNNI, AVX-VNNI, AMX or Arm dot products is needed for it to be much"
                " faster than float32.",
            ),
            (
                slow,
                f"int8 products take {1 / self.product.speedup:.1f} times as long as those of"
                " float32 here. Run this again when nothing else runs; if it stays so, train in"
                " floats here.",
            ),
        ]
        return tuple(text for holds, text in checks if holds)


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_product(shape: tuple[int, int, int] = (512, 512, 2048), repeats: int = 5) -> ProductCheck:
    """Multiply int8 matrices as the layers do, compare with exact arithmetic and time it.

    The codes lie near +127 and -127. So their sums pass 2^24, where float32 rounds. They also
    saturate the instructions of CPUs without int8 dot products, which add pairs of unsigned times
    signed products in 16 bits.
    """
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(120, 128, (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(120, 128, (n, k), dtype=torch.int8, generator=generator)
    a[::2].neg_()
    b[::3].neg_()
    try:
        multiply = gemm.untuned_product
        product = multiply(a, b)
    except (LibraryError, OSError):  # `library_faults` reports it
        multiply = gemm.int8_product
        product = multiply(a, b)
    a_float, b_float = a.float(), b.float()
    int8_times, float32_times = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(a, b)
        middle = time.perf_counter()
        torch.mm(a_float, b_float.t())
        int8_times.append(middle - start)
        float32_times.append(time.perf_counter() - middle)
    return ProductCheck(
        exact=torch.equal(product, gemm.reference(a, b)),
        shape=shape,
        int8_milliseconds=1e3 * statistics.median(int8_times),
        float32_milliseconds=1e3 * statistics.median(float32_times),
    )


def library_faults() -> dict[str, str]:
    """Return built library -> why it cannot be used; usable libraries are left out."""
    loads = {"C++ library": loader.library}
    if runtime.LIBRARY.exists():
        loads["launcher"] = runtime.library
    faults = {}
    for name, load in loads.items():
        try:
            load()
        except (LibraryError, OSError) as error:
            faults[name] = str(error)
    return faults


def report() -> Report:
    """Examine this machine, in well under a second."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    faults, features = library_faults(), processor.cpu_features()
    library = "UNUSABLE (see below)"
    if "C++ library" not in faults:
        library = loader.description() if loader.available() else None
    optional = [name for extra in EXTRAS.values() for name in extra.packages]
    return Report(
        cpu=processor.cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        cpu_features=tuple(
            name for flag, name in processor.CPU_FEATURES.items() if flag in features
        ),
        cuda=torch.version.cuda,
        gpus=tuple(
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
            for gpu in gpus
        ),
        host_library=library,
        gpu_fault=gpu_fault(),
        faults=faults,
        packages={name: installed_version(name) for name in (*REQUIRED, *optional)},
        product=check_product(),
    )


def kernel_name() -> str:
    """Name the kernel that multiplies int8 on this CPU."""
    try:
        fastest, *_ = (*tiles.usable(), None)
    except (LibraryError, OSError):
        fastest = None
    return "oneDNN (torch._int_mm)" if fastest is None else f"lsq's tiles ({fastest})"


def text(found: Report) -> str:
    built_for = f"CUDA {found.cuda}" if found.cuda else "the CPU alone"
    gpu = f"none that torch can use (it is built for {built_for})"
    if found.gpus:
        used = "NOT USED, see below" if found.gpu_fault else "used"
        gpu = f"{'; '.join(found.gpus)} ({used})"
    loops = "the C++ library" if found.host_library else "plain torch"
    path = f"CPU: matrix products by {kernel_name()}, the loops between them by {loops}"
    if found.on_gpu:
        path = f"GPU: matrix products by cuBLASLt and kernels of lsq, which do all else; {path}"
    product, (m, n, k) = found.product, found.product.shape
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    rows = {
        "lsq": f"{lsq.__version__}, {system}",
        "CPU": f"{found.cpu}; cores: {found.cores}, torch threads: {found.threads}",
        "CPU features": ", ".join(found.cpu_features) or "unknown",
        "GPU": gpu,
        "C++ library": found.host_library or "none (plain PyTorch)",
        "int8 path": path,
        "int8 product": f"{'exact' if product.exact else 'WRONG'}; {m} x {n} x {k} in"
        f" {product.int8_milliseconds:.2f} ms, {product.speedup:.1f} times as fast as float32",
        **{name: found.packages[name] or "MISSING" for name in REQUIRED},
    }
    for name, extra in EXTRAS.items():
        there = [f"{one} {found.packages[one]}" for one in extra.packages if found.packages[one]]
        missing = [one for one in extra.packages if not found.packages[one]]
        parts = [", ".join(there)] if there else []
        parts += [f"not installed: {', '.join(missing)}"] if missing else []
        rows[f"extra {name}"] = f"{'; '.join(parts)} (for {extra.purpose})"
    width = max(map(len, rows)) + 2
    advice = [f"* {line}" for line in found.advice] or ["Nothing to do."]
    return "\n".join([*(f"{name:<{width}}{value}" for name, value in rows.items()), "", *advice])


def run(arguments: list[str]) -> int:
    """Print the report; return 0 if training works here, else 1."""
    command_parser("doctor", Options).parse_args(arguments)
    found = report()
    print(text(found))
    return 0 if found.healthy else 1
