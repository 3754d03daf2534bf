"""`lsq doctor`: what this machine can do, which int8 path will run here, and what to install for
more."""

import dataclasses
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from importlib import metadata

import torch

import lsq
from lsq import gemm
from lsq.native import loader, processor, runtime, tiles
from lsq.native.shared_library import LibraryError
from lsq.run.cuda import gpu_fault

REQUIRED = (
    "torch",
    "numpy",
    "filelock",
    "sacrebleu",
    "sentencepiece",
    "num2words",
    "safetensors",
    "tqdm",
    "matplotlib",
    "tensorboard",
    "tabulate",
)
EXTRAS = {
    "fairseq": ("training in fairseq", ("fairseq-fixed",)),
    "huggingface": ("models of Hugging Face", ("transformers", "accelerate")),
    "ctranslate2": ("`lsq export --to ctranslate2`", ("ctranslate2",)),
    "cuda13": ("kernels on a GPU", ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas")),
    "serve": ("translations over HTTP, `lsq serve`", ("uvicorn", "starlette", "prometheus-client")),
    "dev": (
        "tests of lsq",
        ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "uv", "peft", "trl"),
    ),
}
"""Name of an extra of this package -> (what it is for, the packages that it installs, beside those
of other extras)."""
OPTIONAL = tuple(package for _, packages in EXTRAS.values() for package in packages)

INT8_FEATURES = {
    "AVX-VNNI",
    "AVX-512 VNNI",
    "AMX int8",
    "Arm dot product",
    "Arm int8 matrix multiply",
}
"""The features that multiply int8 faster than floats; without any, int8 works but is hardly faster.
"""


@dataclass(frozen=True, kw_only=True)
class ProductCheck:
    """One int8 product, compared with exact arithmetic and timed against float32."""

    exact: bool
    """Whether every int32 sum equals exact arithmetic, on codes so large that float32 sums would
    round."""
    shape: tuple[int, int, int]
    """(M, N, K): [M, K] times [N, K] transposed."""
    int8_milliseconds: float
    """Median time of the int8 product."""
    float32_milliseconds: float
    """Median time of the float32 product of the same shape."""

    @property
    def speedup(self) -> float:
        return self.float32_milliseconds / self.int8_milliseconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `lsq doctor` found."""

    version: str
    python: str
    system: str
    cpu: str
    cores: int
    """Logical cores that this process may use."""
    threads: int
    """Threads that torch uses."""
    cpu_features: tuple[str, ...]
    """The names in processor.CPU_FEATURES that this CPU has; empty where the system does not tell.
    """
    gpus: tuple[str, ...]
    """CUDA devices that torch sees."""
    cuda: str | None
    """The version of CUDA that torch is built for; None: for none."""
    gpu_fault: str | None
    """Why layers cannot compute on the first of them; None: they can."""
    host_library: str | None
    """Which C++ library runs the fused loops; None: plain torch does, as none was built."""
    faults: dict[str, str]
    """Libraries that were built but cannot be used -> why, and what to do."""
    packages: dict[str, str | None]
    """Version of each required and optional package; None where it is not installed."""
    product: ProductCheck

    @property
    def healthy(self) -> bool:
        """Whether training works: exact int8 products, no unusable library, every required package
        installed."""
        return (
            self.product.exact and not self.faults and all(self.packages[name] for name in REQUIRED)
        )

    @property
    def on_gpu(self) -> bool:
        """Whether layers compute on a GPU."""
        return bool(self.gpus) and not self.gpu_fault

    @property
    def advice(self) -> tuple[str, ...]:
        """What the user can do about what was found, most important first; empty when there is
        nothing to do."""
        advice = []
        if not self.product.exact:
            advice.append(
                "int8 products are wrong on this machine: do not train in int8 here. Another"
                " version of torch "
                "may be right; please report the CPU and the versions above."
            )
        advice += [f"The {name} cannot be used: {fault}" for name, fault in self.faults.items()]
        missing = [name for name in REQUIRED if not self.packages[name]]
        if missing:
            advice.append(f"Required packages are missing: pip install {' '.join(missing)}")
        if self.gpus and self.gpu_fault:
            advice.append(f"The GPU cannot be used: {self.gpu_fault}")
        if self.host_library is None:
            advice.append(
                "The C++ library is missing, so plain torch runs the fused loops, slower. Install a"
                " C++17 "
                "compiler with OpenMP (Debian, Ubuntu: apt install g++; Fedora: dnf install"
                " gcc-c++) and install "
                "lsq again (in a clone: make library)."
            )
        if self.cpu_features and not INT8_FEATURES.intersection(self.cpu_features):
            advice.append(
                "This CPU has no int8 dot-product instructions: int8 training works, but a CPU with"
                " AVX-512 "
                "VNNI, AVX-VNNI, AMX or Arm dot products is needed for it to be much faster than"
                " float32."
            )
        elif self.product.speedup < 1 and not self.on_gpu:
            advice.append(
                f"int8 products take {1 / self.product.speedup:.1f} times as long as those of"
                " float32 here: `lsq tune` "
                "may find faster ones. Run this again when nothing else runs; if it stays so, train"
                " in floats here."
            )
        return tuple(advice)


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_product(shape: tuple[int, int, int] = (512, 512, 2048), repeats: int = 5) -> ProductCheck:
    """Multiply int8 matrices as the layers do, compare with exact arithmetic and time it.

    The codes lie near +127 and -127: their sums pass 2^24, where float32 rounds, and the
    instructions of CPUs without int8 dot products (pairs of unsigned times signed, added in 16
    bits) saturate on them.
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
    except (LibraryError, OSError):  # which stands among the faults
        multiply = gemm.int8_product
        product = multiply(a, b)
    exact = torch.equal(product, gemm.reference(a, b))
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
        exact=exact,
        shape=shape,
        int8_milliseconds=1e3 * statistics.median(int8_times),
        float32_milliseconds=1e3 * statistics.median(float32_times),
    )


def library_faults() -> dict[str, str]:
    """Each library of lsq's that was built but cannot be used, and why; one that was not built is
    no fault."""
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
    """Look at this machine; takes well under a second."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    faults = library_faults()
    usable = "C++ library" not in faults
    return Report(
        version=lsq.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=processor.cpu_model(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        cpu_features=tuple(
            name
            for flag, name in processor.CPU_FEATURES.items()
            if flag in processor.cpu_features()
        ),
        cuda=torch.version.cuda,
        gpus=tuple(
            f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
            for gpu in gpus
        ),
        host_library="UNUSABLE (see below)"
        if not usable
        else loader.description()
        if loader.available()
        else None,
        gpu_fault=gpu_fault(),
        faults=faults,
        packages={name: installed_version(name) for name in (*REQUIRED, *OPTIONAL)},
        product=check_product(),
    )


def kernel_name() -> str:
    """What multiplies int8 on this CPU where nothing is tuned, for people."""
    try:
        fastest, *_ = (*tiles.usable(), None)
    except (LibraryError, OSError):
        fastest = None
    return "oneDNN (torch._int_mm)" if fastest is None else f"lsq's tiles ({fastest})"


def text(found: Report) -> str:
    """The report for people."""
    m, n, k = found.product.shape
    seen = "; ".join(found.gpus)
    loops = "the C++ library" if found.host_library else "plain torch"
    gpu = (
        "none that torch can use (it is built for"
        f" {f'CUDA {found.cuda}' if found.cuda else 'the CPU alone'})"
    )
    if seen:
        gpu = f"{seen} ({'NOT USED, see below' if found.gpu_fault else 'used'})"
    path = f"CPU: matrix products by {kernel_name()}, the loops between them by {loops}"
    if found.on_gpu:
        path = f"GPU: matrix products by cuBLASLt and kernels of lsq, which do all else; {path}"
    rows = [
        ("lsq", f"{found.version}, Python {found.python}, {found.system}"),
        (
            "CPU",
            f"{found.cpu}, {_count(found.cores, 'core')}, {_count(found.threads, 'torch thread')}",
        ),
        ("CPU features", ", ".join(found.cpu_features) or "unknown"),
        ("GPU", gpu),
        ("C++ library", found.host_library or "none (plain PyTorch)"),
        ("int8 path", path),
        (
            "int8 product",
            f"{'exact' if found.product.exact else 'WRONG'}; {m} x {n} x {k} in "
            f"{found.product.int8_milliseconds:.2f} ms, {found.product.speedup:.1f} times as fast"
            " as float32",
        ),
        *((name, found.packages[name] or "MISSING") for name in REQUIRED),
        *(
            (f"extra {extra}", f"{_of_extra(found, packages)} (for {use})")
            for extra, (use, packages) in EXTRAS.items()
        ),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    lines += (
        ["", *(f"* {line}" for line in found.advice)] if found.advice else ["", "Nothing to do."]
    )
    return "\n".join(lines)


def _of_extra(found: Report, packages: tuple[str, ...]) -> str:
    there = [f"{name} {found.packages[name]}" for name in packages if found.packages[name]]
    missing = [name for name in packages if not found.packages[name]]
    parts = [", ".join(there)] if there else []
    return "; ".join([*parts, f"not installed: {', '.join(missing)}"] if missing else parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def run(*, as_json: bool = False) -> int:
    """Print the report, as text or as one JSON object; the exit status: 0 if training works here,
    else 1."""
    found = report()
    if as_json:
        print(
            json.dumps(
                dataclasses.asdict(found) | {"advice": found.advice, "healthy": found.healthy}
            )
        )
    else:
        print(text(found))
    return 0 if found.healthy else 1
