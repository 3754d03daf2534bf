"""Runs the PTX that NVRTC makes of a kernel, on the CPU: the tests' second opinion beside the
emulator.

csrc/ reads the text, runs its threads one after another, and ends with an error that names kernel,
block, thread and line for what a GPU leaves undefined. It shares no code with lsq's emulator.
"""

import ctypes
import functools
import itertools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch

from lsq.native import cache, compiler, loader, sources
from lsq.native.launch import TICKET, TICKETS, Kernel, Launch, Product
from lsq.program.backend import Call
from lsq.program.operation import Operation
from lsq.run.cuda import CUDA
from tests.ptx.layouts import tables

FOLDER = Path(__file__).parent / "csrc"
# No fused or reordered arithmetic: rounding is set at run time.
FLAGS = ["-O1", "-std=c++17", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=off", "-frounding-math", "-fno-strict-aliasing"]
MESSAGE_BYTES = 4096


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("parameters", ctypes.POINTER(ctypes.c_char_p)),
        ("parameter_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("parameter_count", ctypes.c_uint64),
        ("allocations", ctypes.POINTER(ctypes.c_uint64)),
        ("allocation_count", ctypes.c_uint64),
        ("order", ctypes.c_int),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Load the interpreter; build it unless it is cached. Raises RuntimeError: the build failed."""
    compiler_words = shlex.split(os.environ.get("CXX") or "g++")
    files = sorted(FOLDER.iterdir())
    name = cache.digest(repr(FLAGS), *compiler_words, *(path.read_bytes() for path in files))
    target = cache.folder("ptx").absolute() / f"interpreter-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:

            def compiled(path: Path) -> str:
                to = f"{folder}/{path.stem}.o"
                _run([*compiler_words, *FLAGS, "-c", os.fspath(path), "-o", to])
                return to

            objects = list(pool.map(compiled, FOLDER.glob("*.cpp")))
            staged = Path(folder) / "built.so"
            _run([*compiler_words, *FLAGS, "-shared", *objects, "-o", os.fspath(staged)])
            cache.write(target, staged.read_bytes())
    found = ctypes.CDLL(os.fspath(target))
    found.ptx_load.restype = ctypes.c_void_p
    return found


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` failed:\n{result.stderr[:4000]}")


@functools.cache
def ptx_of(kernel: Kernel, target: str) -> str:
    """The PTX of a kernel's file, such as for "compute_80"; kept on disk."""
    text = (compiler.KERNELS / kernel.source).read_text(encoding="utf-8")
    options = compiler.options(target, kernel.defines)
    made_of = text, compiler.device_headers(), sources.operations_header(), compiler.version()
    name = cache.digest(*made_of, kernel.source, repr(options))
    path = cache.folder("ptx") / f"{Path(kernel.source).stem}-{name}.ptx"
    found = cache.load(path)
    if found is None:
        found = compile_ptx(kernel.source, text, options).encode()
        cache.store(path, found)
    return found.decode()


def compile_ptx(source: str, text: str, options: Sequence[str]) -> str:
    """The PTX that NVRTC makes of a text, in a file of that name."""
    nvrtc, header = compiler._nvrtc(), sources.operations_header().encode()
    program = compiler._checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 1, [header], [b"operations.h"]),
    )
    try:
        status, *_ = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status:
            log = bytearray(compiler._checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC cannot compile {source}:\n{log.decode(errors='replace')}")
        made = bytearray(compiler._checked(nvrtc, nvrtc.nvrtcGetPTXSize(program)))
        nvrtc.nvrtcGetPTX(program, made)
        return made.rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Module:
    """PTX that has been read. Raises RuntimeError: it holds what the interpreter does not know."""

    def __init__(self, text: str):
        given, self._free = tables(), library().ptx_free
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        flat = [numpy.ravel(table) for table in given.values()]
        pointers = [table.ctypes.data_as(ctypes.c_void_p) for table in flat]
        self._module = library().ptx_load(
            text.encode(),
            ctypes.c_uint64(len(given)),
            (ctypes.c_char_p * len(given))(*(name.encode() for name in given)),
            (ctypes.c_int * len(given))(*map(len, flat)),
            (ctypes.c_void_p * len(given))(*pointers),
            message,
            ctypes.c_size_t(MESSAGE_BYTES),
        )
        if not self._module:
            raise RuntimeError(message.value.decode(errors="replace"))

    def __del__(self) -> None:
        if getattr(self, "_module", None):
            self._free(ctypes.c_void_p(self._module))

    def launch(
        self,
        name: str,
        *arguments,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared: int = 0,
        order: int = 0,
        known: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Run a kernel.

        Args:
            name: of the kernel.
            arguments: as of a Launch, without TICKET; the kernel may touch their tensors, and what
                is `known`.
            grid, block, shared: as of any launch.
            order: of threads: 0 forward, 1 backward, else a seed.
            known: (address, bytes) of other memory.

        Raises:
            RuntimeError: the kernel does what a GPU leaves undefined; the message says where.
        """
        allocations = list(itertools.chain(*known))

        def address(tensor: torch.Tensor) -> int:
            allocations.extend((tensor.data_ptr(), tensor.nbytes))
            return tensor.data_ptr()

        values = [_bytes(value, address) for value in arguments]
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        launch = _Launch(
            kernel=name.encode(),
            grid=grid,
            block=block,
            shared=shared,
            parameters=(ctypes.c_char_p * len(values))(*values),
            parameter_bytes=(ctypes.c_uint64 * len(values))(*map(len, values)),
            parameter_count=len(values),
            allocations=(ctypes.c_uint64 * len(allocations))(*allocations),
            allocation_count=len(allocations) // 2,
            order=order,
        )
        if library().ptx_launch(
            ctypes.c_void_p(self._module),
            ctypes.byref(launch),
            message,
            ctypes.c_size_t(MESSAGE_BYTES),
        ):
            raise RuntimeError(message.value.decode(errors="replace"))


class Interpreter:
    """Stands in for a lsq.native.device.Device, as far as tests/ops/cuda.py needs one.

    Args:
        target: architecture that kernels are compiled for; those by wgmma are for "compute_90a".
    """

    name, torch_device = "PTX interpreter", torch.device("cpu")

    def __init__(self, target: str = "compute_80"):
        self.target = target
        self._modules: dict[tuple[Kernel, str], Module] = {}
        self._ticket = torch.zeros(TICKETS, dtype=torch.int32)
        self.order = 0
        """Of threads: see `Module.launch`."""
        self.launched: set[Kernel] = set()
        self.known: list[tuple[int, int]] = []
        """(address, bytes) of memory beside the tensors of a launch's arguments."""

    def list(self, entries: Sequence[Launch | Product], *, title: str = "") -> "_List":
        """What `run` runs."""
        return _List(lambda: self.run(entries, title))

    def run(self, entries: Sequence[Launch | Product], title: str = "") -> None:
        """Run launches and products. Raises RuntimeError as `Module.launch`."""
        for entry in entries:
            if isinstance(entry, Product):
                multiply(entry)
                continue
            try:
                self._launch(entry)
            except RuntimeError as error:
                self._ticket.zero_()
                raise RuntimeError(f"{title}: {entry.kernel}: {error}") from None

    def _launch(self, entry: Launch) -> None:
        target = "compute_90a" if "WGMMA" in dict(entry.kernel.defines) else self.target
        key = entry.kernel, target
        if key not in self._modules:
            self._modules[key] = Module(ptx_of(*key))
        self._modules[key].launch(
            entry.kernel.name,
            *(self._ticket if value is TICKET else value for value in entry.arguments),
            grid=entry.grid,
            block=entry.block,
            shared=entry.shared,
            order=self.order,
            known=self.known,
        )
        self.launched.add(entry.kernel)
        assert not self._ticket.any(), f"{entry.kernel} leaves its ticket changed"


class InterpretedCUDA(CUDA):
    """A backend whose kernels run in the interpreter, its target."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        def run() -> None:
            for operation, scratch in calls:
                before = self.target.known
                steps = getattr(operation, "steps", ())  # which kernels read in a table
                self.target.known = [*before, *itertools.chain(*map(_memory, steps))]
                self.target.run(operation.cuda(*scratch), operation.name)
                self.target.known = before

        return run

    def run(self, operation: Operation) -> None:
        self.prepare([(operation, [self.allocate(*one) for one in self.scratch(operation)])])()


def _memory(operation: Operation) -> Iterable[tuple[int, int]]:
    """(address, bytes) of the tensors to which an operation's struct points."""
    words = numpy.frombuffer(bytes(operation.packed), dtype=numpy.uint64)
    for leaf in operation.leaves():
        tensor = leaf.of(operation)
        if tensor is not None:
            yield int(words[leaf.offset // 8]), tensor.nbytes


class _List:
    def __init__(self, run: Callable[[], None]):
        self.run = run


def _bytes(value, address: Callable[[torch.Tensor], int]) -> bytes:
    """A kernel's parameter in memory."""
    if isinstance(value, torch.Tensor):
        return address(value).to_bytes(8, "little")
    if hasattr(value, "pack"):
        return bytes(loader.words(value.pack(address)))
    if isinstance(value, float):
        return numpy.float32(value).tobytes()
    return int(value or 0).to_bytes(8, "little", signed=True)


def multiply(product: Product) -> None:
    """A product as cuBLASLt makes it: integers exact, floats by the nearest."""
    a = product.a.T if product.transpose_a else product.a
    b = product.b if product.transpose_b else product.b.T
    wide = torch.int64 if product.out.dtype == torch.int32 else torch.float64
    product.out.copy_(a.to(wide) @ b.to(wide))
