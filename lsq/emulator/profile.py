"""Counts what kernels do in the emulator: memory accesses by warps, and instructions by kind.

Accesses that the lanes of a warp make together are one request (counters.h). Instructions are
counted in the kernel compiled to scalar code for this machine, which is similar to a GPU's, each
time a warp executes a basic block.
"""

import ctypes
import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lsq import emulator
from lsq.native.device import Device
from lsq.native.launch import Launch
from lsq.native.runtime import Driver

WARP = 32
CALLED = {
    "emulator_float_to_bfloat16": "convert",
    "emulator_bfloat16_pair": "convert",
    "emulator_collective": "exchange",
    "emulator_barrier": "barrier",
    "emulator_load": "memory",
    "emulator_store": "memory",
    "emulator_load_matrices": "memory",
    "emulator_copy_async": "memory",
    "emulator_multiply": "mma",
    "emulator_begin_multiplication": "wgmma",
    "emulator_fence_shared": "barrier",
    "nearbyintf": "convert",
    "rintf": "convert",
    "emulator_larger_magnitude": "float",
    "__fadd_rd": "float",
    "__byte_perm": "permute",
    "__dp4a": "multiply",
    "floorf": "convert",
    "ceilf": "convert",
    "fmaf": "float",
    "fminf": "float",
    "fmaxf": "float",
    "fabsf": "float",
    "sqrtf": "root",
    "sqrt": "root",
    "logf": "logarithm",
}
"""Functions that stand for one or a few GPU instructions -> their kind. Their bodies do not
count."""
KINDS = (
    ("root", r"sqrt[sp][sd]"),
    ("division", r"div[sp][sd]|i?div[lq]?"),
    ("convert", r"cvt\w+"),
    (
        "float",
        r"(add|sub|mul|min|max|and|andn|or|xor|u?comi|cmp\w*|unpckl)(ss|sd|ps|pd)|p(and|or|xor)n?",
    ),
    ("multiply", r"i?mul[lq]?"),
    ("branch", r"j\w+"),
    (
        "integer",
        r"(add|sub|and|or|xor|not|neg|sh[lr]d?|sa[lr]|ro[lr]|inc|dec|cmp|test|lea|bt\w*)[bwlq]?|(set|cmov)\w+",
    ),
)
"""(kind of instruction, pattern of its x86-64 mnemonics); others (moves, calls) do not count."""
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in KINDS]
_HOOK = "__sanitizer_cov_trace_pc"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Accesses of one kind to one tensor."""

    requests: int = 0
    """Requests by warps."""
    bytes: int = 0
    """Bytes that lanes ask for."""
    sectors: int = 0
    """Sectors of 32 bytes in all requests."""
    touched: int = 0
    """Different sectors among them."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor argument of a launch, and the launch's accesses to it."""

    bytes: int
    reads: Traffic
    writes: Traffic
    atomics: Traffic


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Counts of one launch."""

    kernel: str
    warps: int
    operands: tuple[Operand, ...]
    """In the order of `operands_of`. If a tensor occurs twice, the first has all its accesses."""
    elsewhere: tuple[Traffic, Traffic, Traffic]
    """Reads, writes and atomics of memory outside the operands."""
    shared_requests: int
    shared_passes: int
    """Passes of the banks of shared memory; passes above `shared_least` are conflicts."""
    shared_least: int
    instructions: dict[str, int]
    """Kind -> number of executions by warps."""
    activity: float
    """Mean share of a warp's 32 lanes that take part in an instruction."""


@functools.cache
def device() -> Device:
    """Return the emulator with kernels compiled for counting; its lists hold no products. Raises
    RuntimeError: there is no C++ compiler."""
    return Device(
        name="CUDA emulator that counts",
        driver=Driver(str(emulator.build_driver())),
        products=None,
        compile=lambda kernel: emulator.compile_kernels(
            kernel.source, kernel.defines, profile=True
        ),
        torch_device=torch.device("cpu"),
    )


def operands_of(entry: Launch) -> list[torch.Tensor]:
    """Return the tensor arguments of a launch in order, also those in structs of operations."""
    found: list[torch.Tensor] = []
    for argument in entry.arguments:
        if hasattr(argument, "pack"):
            argument.pack(lambda tensor: found.append(tensor) or 0)
        elif isinstance(argument, torch.Tensor):
            found.append(argument)
    return found


def profile(entries: Sequence[Launch]) -> list[Profile]:
    """Run launches on CPU tensors one after another, and count what each does. Raises RuntimeError:
    a kernel fails, or there is no C++ compiler or objdump; ValueError: as LaunchList."""
    ready = device().list(entries)
    library = ctypes.CDLL(str(emulator.build_driver()))
    library.emulator_profile_end.restype = ctypes.c_char_p
    operands = [operands_of(entry) for entry in entries]
    regions = sorted(
        {_span(tensor) for tensors in operands for tensor in tensors if tensor.numel()}
    )
    begins, ends = (
        (ctypes.c_uint64 * len(regions))(*side)
        for side in ([one[i] for one in regions] for i in (0, 1))
    )
    library.emulator_profile_begin(begins, ends, ctypes.c_int64(len(regions)))
    try:
        ready.run()
    finally:
        records = json.loads(library.emulator_profile_end())
    places = {region: number for number, region in enumerate(regions)}
    return [
        _profile(record, entry, tensors, places)
        for record, entry, tensors in zip(records, entries, operands, strict=True)
    ]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _profile(record: dict, entry: Launch, tensors: list[torch.Tensor], places: dict) -> Profile:
    *regions, elsewhere = (
        [
            Traffic(**dict(zip(("requests", "bytes", "sectors", "touched"), one, strict=True)))
            for one in region
        ]
        for region in record["regions"]
    )
    operands, seen = [], set()
    for tensor in tensors:
        place = places.get(_span(tensor))
        reads, writes, atomics = (
            [Traffic()] * 3 if place is None or place in seen else regions[place]
        )
        seen.add(place)
        size = tensor.numel() * tensor.element_size()
        operands.append(Operand(bytes=size, reads=reads, writes=writes, atomics=atomics))
    instructions, activity = _instructions(record)
    requests, passes, least = record["shared"]
    threads = entry.block[0] * entry.block[1] * entry.block[2]
    return Profile(
        kernel=record["kernel"],
        warps=-(-threads // WARP) * entry.grid[0] * entry.grid[1] * entry.grid[2],
        operands=tuple(operands),
        elsewhere=tuple(elsewhere),
        shared_requests=requests,
        shared_passes=passes,
        shared_least=least,
        instructions=instructions,
        activity=activity,
    )


def _instructions(record: dict) -> tuple[dict[str, int], float]:
    """Return instructions by kind, and the mean share of lanes that took part."""
    code = _code(record["module"])
    found, active = Counter(), 0
    for offset, warps, lanes in record["blocks"]:
        for kind, count in code.get(offset, {}).items():
            found[kind] += warps * count
            active += lanes * count
    total = sum(found.values())
    return dict(found), active / (WARP * total) if total else 1.0


@functools.cache
def _code(module: str) -> dict[int, Counter]:
    """Return the instructions by kind of each basic block, by the address after its call of the
    hook. Raises RuntimeError: there is no objdump."""
    try:
        command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", module]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"objdump, which counts instructions, cannot be run ({error}); install binutils (`apt"
            " install binutils`)"
        ) from error
    blocks: dict[int, Counter] = {}
    now, hooked, inside = None, False, False
    for line in listing.splitlines():
        title = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if title:
            now, inside = None, _called(title.group(1)) is not None
        part = re.match(
            r"\s*([0-9a-f]+):\s+(?:(?:lock|rep\w*|bnd|data16|cs|notrack)\s+)*(\w+)\s*(.*)", line
        )
        if not part or inside:
            continue
        address, name, given = int(part.group(1), 16), part.group(2), part.group(3)
        if hooked:
            now, hooked = blocks.setdefault(address, Counter()), False
        if name.startswith("call") and _HOOK in given:
            hooked = True
        elif now is not None:
            kind = _kind(name, given)
            if kind:
                now[kind] += 1
    return blocks


def _kind(name: str, given: str) -> str | None:
    """Return the kind of an instruction; None: it is not counted."""
    if name.startswith("call"):
        target = re.search(r"<([^+>]*(?:<.*>)?[^+>]*)", given)
        return _called(target.group(1)) if target else None
    if re.search(r"%[re]?[sb]p\b", given.rpartition(",")[2]):  # work on the CPU's stack
        return None
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), None)


def _called(symbol: str) -> str | None:
    name = re.search(r"(?:^|[ :])(\w+)(?:@plt)?(?:[<(]|$)", symbol)
    return CALLED.get(name.group(1)) if name else None


def fitting_blocks(threads: int, registers: int, shared: int, limits: "Limits") -> int:
    """Return the blocks that a multiprocessor holds at once. `shared`: static and dynamic bytes."""
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // 256) * 256
    by_registers = limits.registers // of_warp // warps if registers else limits.blocks
    by_shared = limits.shared // (shared + 1024)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resources of a multiprocessor."""

    warps: int
    blocks: int
    shared: int
    """Bytes; each block takes 1,024 more than it asks for."""
    registers: int = 65536
