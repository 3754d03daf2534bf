"""Compiles kernels for a GPU architecture with NVRTC, CUDA's compiler as a library, and keeps them
on disk.

NVRTC comes with cuda.bindings, which PyTorch's CUDA builds bring along; it needs no driver and no
GPU. Kernels are compiled to machine code (cubin), because PTX for sm_90a is tied to one driver.
"""

import functools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lsq import extras
from lsq.native import cache, sources

KERNELS = sources.FOLDER / "cuda"
SHARED = sources.FOLDER / "include"
"""Headers that kernels share with the host library."""
OLDEST = (8, 0)
"""Oldest compute capability that has bfloat16 conversions and cuBLASLt's int8 products."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one kernel, from the assembler's report."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Per thread: stores and loads of registers that did not fit."""
    stack_bytes: int
    """Per thread, spills included."""
    shared_bytes: int
    """Static shared memory of a block."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Machine code of the kernels of one file."""

    image: bytes
    """A cubin."""
    resources: dict[str, Resources]
    """By kernel name."""


def architecture(capability: tuple[int, int]) -> str:
    """Return the compiler's target for a compute capability: (9, 0) -> "sm_90a". Raises ValueError:
    the GPU is too old."""
    if capability < OLDEST:
        raise ValueError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; lsq's CUDA kernels"
            f" need {OLDEST[0]}.{OLDEST[1]} (Ampere) or newer: train on the CPU, or on a newer GPU"
        )
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def version() -> str:
    """Return the version of NVRTC. Raises RuntimeError: it is not installed."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def remedy() -> str:
    """Return advice for a machine on which PyTorch sees no GPU."""
    if torch.version.cuda is None:
        return "install the NVIDIA driver and a CUDA build of PyTorch"
    return (
        f"install the NVIDIA driver, or update it to one for CUDA {torch.version.cuda}, as this"
        " PyTorch wants"
    )


def check_driver(supported: tuple[int, int]) -> None:
    """Raise RuntimeError if the driver's CUDA has an older major version than the compiler's."""
    major = int(version().partition(".")[0])
    if supported[0] < major:
        raise RuntimeError(
            f"the NVIDIA driver supports CUDA {supported[0]}.{supported[1]}, but kernels are"
            f" compiled by NVRTC {version()}: update the driver to one for CUDA {major}, or install"
            f" NVRTC {supported[0]}"
        )


def compile_kernels(source: str, defines: tuple[tuple[str, int], ...], target: str) -> Compiled:
    """Compile kernels, or return what an earlier call has kept on disk.

    Args:
        source: file in csrc/cuda, or a path elsewhere.
        defines: (name, value) of each -D.
        target: such as "sm_90a".

    Raises:
        RuntimeError: NVRTC is not installed or refuses the source; the message has NVRTC's errors.
    """
    nvrtc = _nvrtc()
    given = [*options(target, defines), "--ptxas-options=-v"]
    text = (KERNELS / source).read_text(encoding="utf-8")
    made_of = text, device_headers(), sources.operations_header(), target, repr(defines), version()
    name = cache.digest(*made_of, "".join(given[:3]))
    path = cache.folder("kernels") / f"{Path(source).stem}-{target}-{name}.cubin"
    found = _parse(cache.load(path))
    if found is None:
        found = _compile(nvrtc, source, text, given)
        report = json.dumps({kernel: asdict(taken) for kernel, taken in found.resources.items()})
        cache.store(path, report.encode() + b"\n" + found.image)
    return found


def options(target: str, defines: tuple[tuple[str, int], ...]) -> list[str]:
    """Return NVRTC's options for a target, such as "sm_90a"."""
    return [
        f"--gpu-architecture={target}",
        "--std=c++17",
        "--fmad=false",
        f"--include-path={KERNELS}",
        f"--include-path={SHARED}",
        *(f"--define-macro={name}={value}" for name, value in defines),
    ]


@functools.cache
def device_headers() -> str:
    """Return the text of all device headers, on which every kernel depends."""
    headers = [*sorted(KERNELS.glob("*.cuh")), *sorted(SHARED.glob("*.h"))]
    return "".join(path.read_text(encoding="utf-8") for path in headers)


def _parse(stored: bytes | None) -> Compiled | None:
    if stored is None:
        return None
    report, _, image = stored.partition(b"\n")
    taken = {kernel: Resources(**values) for kernel, values in json.loads(report).items()}
    return Compiled(image=image, resources=taken)


@functools.cache
def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"NVRTC, which compiles CUDA kernels, cannot be used ({error}); install it with"
            f" `{extras.command('cuda13')}`"
        ) from error
    return nvrtc


def _compile(nvrtc, source: str, text: str, options: list[str]) -> Compiled:
    header = sources.operations_header().encode()
    created = nvrtc.nvrtcCreateProgram(
        text.encode(), source.encode(), 1, [header], [b"operations.h"]
    )
    program = _checked(nvrtc, created)
    try:
        status, *_ = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        words = log.rstrip(b"\0 ").decode(errors="replace")
        if status:
            given = " ".join(option for option in options if option.startswith("--define"))
            raise RuntimeError(f"NVRTC cannot compile {source} ({options[0]} {given}):\n{words}")
        image = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        nvrtc.nvrtcGetCUBIN(program, image)
        return Compiled(image=bytes(image), resources=resources(words))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc, answer):
    status, value = answer
    if status:
        raise RuntimeError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return value


def resources(log: str) -> dict[str, Resources]:
    """Return the resources of each kernel from the assembler's report (-v)."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        sizes = (
            re.search(rf"(\d+) bytes {what}", part)
            for what in ("stack frame", "spill stores", "spill loads")
        )
        stack, stores, loads = (int(size.group(1)) for size in sizes)
        shared = re.search(r"(\d+) bytes smem", part)
        found[part.partition("'")[0]] = Resources(
            registers=int(re.search(r"Used (\d+) registers", part).group(1)),
            spill_bytes=stores + loads,
            stack_bytes=stack,
            shared_bytes=int(shared.group(1)) if shared else 0,
        )
    return found
