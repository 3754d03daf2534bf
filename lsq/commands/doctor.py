"""`lsq doctor`: what this machine can do, which int8 path runs here, and what to install for more.

`lsq doctor --emulate` runs every CUDA operation in the emulator and compares it with its reference.
That takes a C++ compiler and no GPU. It shows that kernels, the launcher and the calls of products
compute what they should; it cannot show how fast a GPU is, or that its driver works.
"""

import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch
from tqdm import tqdm

import lsq
from lsq import gemm
from lsq.commands.options import command_parser
from lsq.config import LayerConfig, QuantConfig, RelativeBias, Rotary
from lsq.extras import EXTRAS, REQUIRED
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import linear
from lsq.layers.programs import Mode, Table
from lsq.native import loader, processor, runtime, tiles
from lsq.native.sources import LibraryError
from lsq.ops.rounding import RoundWeight
from lsq.ops.sums import FinishSums, PartialSums
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import border_tensors
from lsq.program.tensor import VirtualTensor
from lsq.run.backends import backend
from lsq.run.cuda import gpu_fault

FLOAT_LIMIT = 1e-4
"""Largest difference of floats in the emulator, relative to the largest magnitude."""
CODE_LIMIT = 2e-3
"""Largest share of codes that may differ by one in the emulator: float sums in another order round
to the neighbouring code."""
INT8_FEATURES = {
    "AVX-VNNI",
    "AVX-512 VNNI",
    "AMX int8",
    "Arm dot product",
    "Arm int8 matrix multiply",
}
"""Features that multiply int8 faster than floats."""


class Options(Namespace):
    """Say what this machine can do, which int8 path runs here, and what to install for more."""

    json: bool = False
    """print the report as one JSON object"""
    emulate: bool = False
    """run the CUDA kernels in an emulator on the CPU and compare them with their references,
    instead of the report; takes a C++ compiler, no GPU, and about half a minute the first time"""


@dataclass(frozen=True, kw_only=True)
class ProductCheck:
    """One int8 product [M, K] times [N, K] transposed, compared with exact arithmetic and timed
    against float32."""

    exact: bool
    shape: tuple[int, int, int]
    """(M, N, K)"""
    int8_milliseconds: float
    float32_milliseconds: float

    @property
    def speedup(self) -> float:
        return self.float32_milliseconds / self.int8_milliseconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """What this machine has and can do."""

    version: str
    python: str
    system: str
    cpu: str
    cores: int
    """Logical cores that this process may use."""
    threads: int
    """Threads that torch uses."""
    cpu_features: tuple[str, ...]
    """Features of the processor, by processor.CPU_FEATURES; empty where the system hides them."""
    gpus: tuple[str, ...]
    """CUDA devices that torch sees."""
    cuda: str | None
    """The version of CUDA that torch is built for."""
    gpu_fault: str | None
    """Why layers cannot compute on the first GPU; None: they can."""
    host_library: str | None
    """The C++ library that runs the fused loops; None: plain torch does."""
    faults: dict[str, str]
    """Libraries that were built but cannot be used -> why, and what to do."""
    packages: dict[str, str | None]
    """Version of each required and optional package; None: it is not installed."""
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
        """Whether layers compute on a GPU."""
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
            (
                self.missing,
                f"Required packages are missing: pip install {' '.join(self.missing)}",
            ),
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
    """Return the installed version of a distribution, or None; nothing is imported."""
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
    """Return each library of lsq's that was built but cannot be used, and why."""
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
    """Look at this machine, in well under a second."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    faults, features = library_faults(), processor.cpu_features()
    library = "UNUSABLE (see below)"
    if "C++ library" not in faults:
        library = loader.description() if loader.available() else None
    optional = [name for extra in EXTRAS.values() for name in extra.packages]
    return Report(
        version=lsq.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
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
    """Name the int8 product on this CPU where nothing is tuned."""
    try:
        fastest, *_ = (*tiles.usable(), None)
    except (LibraryError, OSError):
        fastest = None
    return "oneDNN (torch._int_mm)" if fastest is None else f"lsq's tiles ({fastest})"


def text(found: Report) -> str:
    """Format the report for people."""
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
    cores, threads = _count(found.cores, "core"), _count(found.threads, "torch thread")
    rows = {
        "lsq": f"{found.version}, Python {found.python}, {found.system}",
        "CPU": f"{found.cpu}, {cores}, {threads}",
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def run(arguments: list[str]) -> int:
    """Print the report, or check the emulator; the exit status is 0 if training works here, or all
    kernels agree, else 1."""
    parser = command_parser("doctor", Options)
    options = parser.parse_args(arguments)
    if options.emulate and options.json:
        parser.error("--json is for the report; it does not go with --emulate")
    if options.emulate:
        return emulate()
    found = report()
    if options.json:
        fields = dataclasses.asdict(found)
        print(json.dumps(fields | {"advice": found.advice, "healthy": found.healthy}))
    else:
        print(text(found))
    return 0 if found.healthy else 1


# The emulator


@dataclass(frozen=True, kw_only=True)
class OperationCheck:
    """One call of an operation in the emulator, beside its reference."""

    operation: str
    floats: float
    """Largest difference of float results, relative to the largest magnitude; infinity where NaN
    are elsewhere."""
    integers: float
    """Share of codes and bits that differ; infinity where codes differ by more than one."""

    @property
    def agrees(self) -> bool:
        return self.floats <= FLOAT_LIMIT and self.integers <= CODE_LIMIT


def emulate() -> int:
    """Check the CUDA operations in the emulator; the exit status is 0 if all agree with their
    references, else 1."""
    try:
        backend("emulated")
    except RuntimeError as error:  # no C++ compiler, or it fails
        print(f"lsq doctor: {error}", file=sys.stderr)
        return 1
    found = list(tqdm(checks(), desc="emulating", unit="operation", disable=None, leave=False))
    names = sorted({check.operation for check in found})
    for name in names:
        calls = [check for check in found if check.operation == name]
        worst = max(check.floats for check in calls), max(check.integers for check in calls)
        verdict = "agrees" if all(check.agrees for check in calls) else "DIFFERS"
        figures = f"floats {worst[0]:.1e}, codes {worst[1]:.1%}, {len(calls)} calls"
        print(f"{name:<42}{verdict:<9}{figures}")
    wrong = sum(not check.agrees for check in found)
    total = f"{len(names)} CUDA operations in {len(found)} calls"
    print(f"{total}; {wrong or 'none'} differ from their references.")
    return 1 if wrong else 0


SMALL = {"hidden": 48, "heads": 3, "feed_forward": 112}


def trained() -> list[Program]:
    """Build small programs that run every operation of training in all modes, as a GPU has them."""
    found, batch = [], PackedSequences(rows=21, count=3)
    for quant, activation, norm in (
        (QuantConfig(backward="int8"), "relu", "layer"),
        (QuantConfig(backward="float", clip_gradient="lsq"), "gelu", "rms"),
        (QuantConfig(mode="float"), "relu", "layer"),
    ):
        dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
        config = LayerConfig(**SMALL, **dropouts, activation=activation, norm=norm, quant=quant)
        mode = Mode(training=True, backward=True, backend=backend("emulated"))
        sizes = {"vocabulary": 11, "hidden": config.hidden, "positions": 9, "padding": 1}
        table = Table(**sizes, scale=2.0, dropout=0.1, learned=True)
        gated = replace(config, activation="silu", gated=True, bias=False)
        found += [
            programs.feed_forward(gated, 21, mode),
            linear(quant, 21, config.hidden, 32, mode, bias=True),
            programs.decoder_layer(config, batch, PackedSequences(rows=27, count=3), mode),
            programs.vocabulary_loss(quant, 41, 91, config.hidden, mode, padding=1, smoothing=0.1),
            programs.embedding(quant, 15, table, mode),
        ]
    turned = turning(LayerConfig(**SMALL))
    return [*found, programs.self_attention(turned, batch, mode, causal=True)]


def turning(config: LayerConfig) -> LayerConfig:
    """Add grouped queries, norms of heads, rotary embeddings, a window and biases by distance."""
    return replace(
        config,
        kv_heads=1,
        rotary=Rotary(positions=9),
        qk_norm=1e-6,
        window=5,
        relative_bias=RelativeBias(buckets=8, farthest=6),
    )


def checks() -> Iterator[OperationCheck]:
    """Run every operation of every program, and before them those that round its weights;
    RuntimeError if a kernel fails."""
    for program in trained():
        values = border_tensors(program)
        weights = [
            RoundWeight(weight=weight)
            for weight in program.weights.values()
            if weight.codes is not None
        ]
        finishing = [found for found in program.operations if isinstance(found, FinishSums)]
        sums = {one.parts: one for operation in finishing for one in operation.sums}
        for operation in (*weights, *program.operations):
            expected, found = (_run(name, operation, values) for name in ("reference", "emulated"))
            values.update(zip(operation.outputs, expected, strict=True))
            pairs = _comparable(operation.outputs, found, expected, sums)
            floats = [pair for pair in pairs if pair[1].dtype.is_floating_point]
            integers = [pair for pair in pairs if not pair[1].dtype.is_floating_point]
            yield OperationCheck(
                operation=operation.name,
                floats=max((_of_floats(*pair) for pair in floats), default=0.0),
                integers=max((_of_integers(*pair) for pair in integers), default=0.0),
            )


def _run(
    name: str, operation: Operation, values: dict[VirtualTensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return what an operation writes on a backend, in memory of its own, over what was there."""
    made = {
        tensor: values[tensor].clone()
        if tensor in values
        else torch.full(tensor.shape, 85, dtype=tensor.dtype)
        for tensor in operation.outputs
    }
    bound = operation.bind(lambda tensor: made[tensor] if tensor in made else values[tensor])
    backend(name).run(bound)
    return bound.outputs


def _comparable(
    tensors: Sequence[VirtualTensor],
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    sums: Mapping[VirtualTensor, PartialSums],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair tensors that are to be equal: of sums over rows that are left in parts, the totals."""
    pairs = []
    for tensor, *pair in zip(tensors, found, expected, strict=True):
        if tensor in sums:
            one, other = (replace(sums[tensor], parts=parts).add_up() for parts in pair)
            wanted = [name for name in one if getattr(sums[tensor], name) is not None]
            pairs += [(one[name], other[name]) for name in wanted]
        else:
            pairs.append(pair)
    return pairs


def _of_floats(found: torch.Tensor, wanted: torch.Tensor) -> float:
    usable = wanted.isfinite()
    if not torch.equal(found.isfinite(), usable):
        return float("inf")
    if not usable.any():
        return 0.0
    difference = (found - wanted)[usable].abs().max().item()
    return difference / max(wanted[usable].abs().max().item(), 1e-6)


def _of_integers(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.numel() or torch.equal(found, wanted):
        return 0.0
    if wanted.dtype == torch.int8 and (found.int() - wanted.int()).abs().max() > 1:
        return float("inf")
    differing = int((found != wanted).sum())
    return differing / wanted.numel() if differing > 1 else 0.0
