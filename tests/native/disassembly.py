"""The instructions of compiled kernels, by NVIDIA's disassembler, and what is wrong with them."""

import functools
import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import pytest

DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""The package of it."""
OF_GLOBAL_MEMORY = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"}
"""Instructions, by their first part."""
INSTRUCTION_BYTES = 16
WIDE = {"64": 2, "128": 4, "WIDE": 2}
"""Part of an instruction's code -> registers that each of its operands may be the first of."""
TO_GROUP = "gsb0"
"""Operand of a wgmma that ends a group."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One of machine code."""

    code: str
    """With its modifiers, e.g. "LDG.E.128"."""
    operands: str = ""
    condition: str = ""
    """The predicate under which it runs, e.g. "@!P0"."""

    @property
    def parts(self) -> list[str]:
        return self.code.split(".")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Static shared memory of a kernel: dynamic shared memory begins behind it."""

    bytes: int
    alignment: int


@functools.cache
def disassembler() -> str:
    """The program's path; skips the test where the package is not installed."""
    try:
        (found,) = (
            file for file in metadata.files(DISASSEMBLER) if file.name.startswith("nvdisasm")
        )
    except metadata.PackageNotFoundError:
        pytest.skip(f"{DISASSEMBLER} is not installed")
    return str(found.locate())


def disassembled(image: bytes) -> dict[str, list[Instruction]]:
    """The instructions of each kernel of a cubin, as they lie in memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [disassembler(), "-json", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm fails: {done.stderr.strip()}")
    _, functions = json.loads(done.stdout)
    return {
        function["function-name"]: [
            Instruction(
                code=one["opcode"],
                operands=one.get("operands", ""),
                condition=one.get("predicate", ""),
            )
            for one in function["sass-instructions"]
        ]
        for function in functions
    }


def shared_memory(image: bytes) -> dict[str, Shared]:
    """The shared memory of each kernel of a cubin that has some, from the sections' headers."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    names = headers[of_names][4]
    found = {}
    for name, _, _, _, _, bytes, _, _, alignment, _ in headers:
        text = image[names + name : image.index(b"\0", names + name)].decode()
        kernel = text.removeprefix(".nv.shared.")
        if kernel != text and not kernel.startswith("reserved."):
            found[kernel] = Shared(bytes=bytes, alignment=alignment)
    return found


def local_memory(instructions: Sequence[Instruction]) -> Iterator[str]:
    """Reads and writes of memory that registers or arrays without a fixed index have spilled to."""
    yield from (one.code for one in instructions if one.parts[0] in ("LDL", "STL"))


def doubles(instructions: Sequence[Instruction]) -> Iterator[str]:
    """Arithmetic in double precision, a 64th as fast on most GPUs."""
    yield from (one.code for one in instructions if one.parts[0] in ("DADD", "DMUL", "DFMA"))


def float_atomics(instructions: Sequence[Instruction]) -> Iterator[str]:
    """Atomic sums of floats, whose order differs from run to run."""
    for one in instructions:
        if one.parts[0].startswith(("ATOM", "RED")) and any(
            part.startswith(("F16", "F32", "F64", "BF16")) for part in one.parts
        ):
            yield one.code


def narrow_accesses(instructions: Sequence[Instruction]) -> Iterator[str]:
    """Accesses of a single code or two-byte float in global memory.

    Unsigned bytes are masks of eight values, and there is a wider access for each.
    """
    counts = Counter()
    for one in instructions:
        if one.parts[0] in ("LD", "LDG", "ST", "STG"):
            if {"U16", "S16", "S8"} & set(one.parts):
                yield one.code
            counts["masks"] += "U8" in one.parts
            counts["wide"] += bool({"64", "128"} & set(one.parts))
    if counts["masks"] > counts["wide"]:
        yield f"{counts['masks']} accesses of bytes beside {counts['wide']} of 8 or 16 bytes"


def early_accesses(instructions: Sequence[Instruction]) -> Iterator[str]:
    """Accesses of global memory before ACQBULK, which waits for the launches before."""
    for one in instructions:
        if one.code == "ACQBULK":
            return
        if one.parts[0] in OF_GLOBAL_MEMORY:
            yield f"{one.code} before ACQBULK"


def registers_beyond(instructions: Sequence[Instruction], most: int) -> Iterator[str]:
    """Registers that threads use after they have given up all but `most`, wherever they go on."""
    given = [i for i, one in enumerate(instructions) if one.code.startswith("USETMAXREG.DEALLOC")]
    if len(given) != 1:
        yield f"gives up registers {len(given)} times, not once"
        return
    for one in (instructions[i] for i in sorted(_reached(instructions, given[0]))):
        wide = max(WIDE.get(part, 1) for part in one.parts)
        used = [int(number) + wide - 1 for number in re.findall(r"\bR(\d+)", one.operands)]
        if max(used, default=0) >= most:
            yield f"{one.code} {one.operands} after all but {most} registers were given up"


def _reached(instructions: Sequence[Instruction], first: int) -> set[int]:
    """Numbers of the instructions that may run from one on; a call may return behind any other."""
    calls = [i + 1 for i, one in enumerate(instructions) if one.parts[0] == "CALL"]
    found, left = set(), [first]
    while left:
        at = left.pop()
        if at in found or at >= len(instructions):
            continue
        found.add(at)
        one, kind = instructions[at], instructions[at].parts[0]
        if kind in ("BRA", "CALL"):
            left.append(int(one.operands.rpartition(",")[2], 16) // INSTRUCTION_BYTES)
        if kind == "RET":
            left.extend(calls)
        conditional = one.condition or "," in one.operands  # such as BRA.DIV UR4,0x30
        if conditional or kind not in ("BRA", "EXIT", "RET"):
            left.append(at + 1)
    return found


def groups_of_wgmma(instructions: Sequence[Instruction]) -> list[int]:
    """How many multiplications each group has.

    Raises:
        ValueError: a group has no fence before it, is not waited for, or waits within.
    """
    groups, open_group, fenced, waited = [], 0, False, True
    for one in instructions:
        if one.code == "WARPGROUP.ARRIVE":
            fenced = True
        elif one.parts[0] == "IGMMA":
            if not fenced:
                raise ValueError("multiplies without WARPGROUP.ARRIVE")
            open_group += 1
            if TO_GROUP in one.operands:
                groups.append(open_group)
                open_group, fenced, waited = 0, False, False
        elif one.code.startswith("WARPGROUP.DEPBAR"):
            if open_group:
                raise ValueError("waits within a group")
            waited = one.operands.endswith("0x0")
    if open_group or not waited:
        raise ValueError("ends while it multiplies")
    return groups
