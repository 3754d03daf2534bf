"""Counts the turns that each loop of a kernel takes in the emulator, in copies of the sources.

Loops whose length is known at run time, or that are too long to be unrolled: every `for` without a
plain `#pragma unroll` above it. A copy counts each of them for each kernel: the most turns that any
thread has taken.
"""

import ctypes
import os
import re
from pathlib import Path

import torch

from lsq.emulator import build
from lsq.gemm.cublaslt import Products
from lsq.native.device import Device
from lsq.native.launch import Kernel
from lsq.native.runtime import Driver

UNROLLED = re.compile(r"\s*#pragma unroll\s*$")
LOOP = re.compile(r"\bfor \(")
EXPORT = re.compile(r"^LSQ_EXPORT\((\w+)\)", re.MULTILINE)
COUNTER = """\
#pragma once
// Begins with a number that is not 0, so that it does not lie in the memory of shared variables.
static int* turns_of_kernel = reinterpret_cast<int*>(8);
struct Turns {
    int number, count = 0;
    explicit Turns(int number) : number(number) { note(); }
    bool next(bool more) {
        count += more;
        note();
        return more;
    }
    __attribute__((no_sanitize_thread)) void note() {
        if (turns_of_kernel[number] < count + 1) turns_of_kernel[number] = count + 1;
    }
};
#undef LSQ_EXPORT
#define LSQ_EXPORT(kernel) \\
    extern "C" { \\
    EMULATOR_VISIBLE int kernel##__turns[LOOPS + 1] = {1}; \\
    EMULATOR_VISIBLE void kernel##__launch(void** arguments) { \\
        turns_of_kernel = kernel##__turns + 1; \\
        emulator::call(kernel, arguments); \\
    } \\
    EMULATOR_VISIBLE const size_t* kernel##__parameters() { \\
        return emulator::parameters(kernel); \\
    } \\
    }
"""


class CountedKernels:
    """Copies of the kernels that count turns, in an empty `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.loops: list[str] = []
        """The loops of all sources, "file: for (...)"."""
        texts = {source.name: self._counting(source) for source in sorted(build.KERNELS.iterdir())}
        include = '#include "emulation.h"\n'
        counter = f"{include}#define LOOPS {len(self.loops)}\n{COUNTER}"
        for name, text in texts.items():
            folder.joinpath(name).write_text(text.replace(include, counter))

    def _counting(self, source: Path) -> str:
        text, copy, end = source.read_text(), "", 0
        for found in LOOP.finditer(text):
            above = text[: found.start()].rpartition("\n")[0].rpartition("\n")[2]
            if UNROLLED.match(above):
                continue
            loop, head = len(self.loops), _head(text[found.start() :])
            self.loops.append(f"{source.name}: {' '.join(head.split())}")
            begin, condition, step = head.removeprefix("for (").removesuffix(")").split(";")
            more = f"turns{loop}.next({condition.strip() or 'true'})"
            copy += text[end : found.start()]
            copy += f"if (Turns turns{loop}({loop}); true) for ({begin}; {more};{step})"
            end = found.start() + len(head)
        return copy + text[end:]

    def device(self) -> "CountingDevice":
        """A new device in the emulator."""
        return CountingDevice(self)

    def image(self, kernel: Kernel) -> bytes:
        """A compiled copy."""
        return build.compile_kernels(os.fspath(self._folder / kernel.source), kernel.defines)


class CountingDevice(Device):
    """The emulator with kernels that count."""

    def __init__(self, kernels: CountedKernels):
        self._kernels = kernels
        self._counts: dict[tuple[str, str], list[ctypes.Array]] = {}
        products = Products(torch.device("cpu"), library=str(build.build_products()))
        super().__init__(
            name="emulator",
            driver=Driver(str(build.build_driver())),
            compile=self._counting,
            products=products,
            torch_device=torch.device("cpu"),
        )

    def _counting(self, kernel: Kernel) -> bytes:
        image = self._kernels.image(kernel)
        library = ctypes.CDLL(os.fsdecode(image[len(build.MAGIC) : -1]))
        counts = (ctypes.c_int * (len(self._kernels.loops) + 1)).in_dll(
            library, f"{kernel.name}__turns"
        )
        counts[1:] = [0] * len(self._kernels.loops)
        self._counts.setdefault((kernel.source, kernel.name), []).append(counts)
        return image

    def turns(self, source: str) -> dict[str, dict[str, int]]:
        """For each kernel of a source that ran: its loops, and the most turns of each."""
        found = {}
        for (file, name), specialisations in self._counts.items():
            most = [
                max(column) - 1
                for column in zip(*(counts[1:] for counts in specialisations), strict=True)
            ]
            if file == source:
                found[name] = {
                    loop: most[i] for i, loop in enumerate(self._kernels.loops) if most[i] >= 0
                }
        return found


def _head(text: str) -> str:
    """The head of the loop, "for (...)", that a text begins with."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and not depth:
            return text[: place + 1]
    raise ValueError(f"a loop without an end: {text}")
