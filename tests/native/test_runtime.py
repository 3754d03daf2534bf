"""The launcher: what it launches, in which order, with which arguments, and what it says when
something fails."""

import ctypes
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lsq import emulator
from lsq.native import compiler, runtime, sources
from lsq.native.device import Device
from lsq.native.launch import TICKET, Product, launch
from lsq.native.runtime import Driver
from lsq.run import cuda
from tests.native.stub import stub_device

FAULTY = str(Path(__file__).parents[1] / "emulator" / "kernels" / "faulty.cu")
STORE = str(Path(__file__).parent / "store_values.cu")
KERNEL = re.compile(r"^LSQ_KERNEL\b[^{;]*\blsq_\w+\([^{;]*\{\s*([^;]*;)", re.MULTILINE)
"""A kernel up to its first statement."""
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def emulated():
    return cuda.emulated_device()


@pytest.fixture
def stub(tmp_path):
    return stub_device(tmp_path)


def store(memory, first, *values):
    """A launch that writes `values` into memory from `first` on."""
    padded = (*values, *[0] * (8 - len(values)))
    return launch(STORE, "store_values", memory, first, len(values), *padded, grid=1, block=32)


def test_entries_run_in_order_with_their_arguments(emulated):
    memory = torch.zeros(6, dtype=torch.int64)
    emulated.run([store(memory, 0, 1, -2, 2**62), store(memory, 2, 7), store(memory, 5, -1)])
    assert memory.tolist() == [1, -2, 7, 0, 0, -1]


def test_a_list_whose_kernel_crashed_runs_again(emulated):
    crashes, parts, out = torch.ones(4), torch.zeros(4), torch.zeros(4)
    entry = launch(FAULTY, "last_of_three", crashes, TICKET, parts, out, grid=3, block=1)
    work = emulated.list([entry], title="sum")
    with pytest.raises(
        RuntimeError, match=r"sum: last_of_three.*, block \(1, 0, 0\): thread .*SIG(ILL|TRAP)"
    ):
        work.run()
    for tensor in (crashes, parts):
        tensor.zero_()
    work.run()
    assert out[0] == 3


@pytest.mark.parametrize(
    "tensor, message",
    [
        (torch.zeros(16, dtype=torch.int64)[1:], "begins 8 bytes after a multiple of 16"),
        (torch.zeros(4, 4, dtype=torch.int64).t(), r"strides \(1, 4\) is not contiguous"),
        (
            torch.zeros(8, dtype=torch.int64, device="meta"),
            "lies on meta, but this list runs on cpu",
        ),
    ],
)
def test_tensors_that_kernels_cannot_take_are_refused(emulated, tensor, message):
    with pytest.raises(ValueError, match=message):
        emulated.list([store(tensor, 0, 1)])


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"b": torch.zeros(49, 64, dtype=torch.int8).flatten()[1:3073].view(48, 64)},
            "begins 1 bytes after a multiple",
        ),
        (
            {"out": torch.zeros(42, 48, dtype=torch.int32).flatten()[1:1969].view(41, 48)},
            "begins 4 bytes after a multiple",
        ),
        (
            {"out": torch.zeros(41, 48, dtype=torch.int32, device="meta")},
            "product int8.*lies on meta, but this list runs",
        ),
    ],
)
def test_tensors_that_products_cannot_take_are_refused(emulated, changes, message):
    a, b, out = (torch.zeros(shape, dtype=torch.int8) for shape in ((41, 64), (48, 64), (41, 48)))
    with pytest.raises(ValueError, match=message):
        emulated.list([Product(**{"a": a, "b": b, "out": out.int(), **changes})])


def test_a_failed_launch_is_named(emulated, stub):
    memory = torch.zeros(8, dtype=torch.int64)
    target, library = stub
    work = target.list([store(memory, 0, 1), store(memory, 0, 2)], title="quantize")
    work.run()
    library.stub_fail(1)
    with pytest.raises(
        RuntimeError,
        match=(
            r"entry 1 of 2, quantize: store_values, grid \(1, 1, 1\), block \(32, 1, 1\), 0 bytes"
            r" of dynamic shared "
            r"memory: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"
        ),
    ):
        work.run()
    too_large = launch(STORE, "store_values", memory, 0, 1, *[0] * 8, grid=1, block=2048)
    with pytest.raises(RuntimeError, match="store_values.*2048"):
        emulated.run([too_large])


def test_every_entry_is_launched_once_a_run(stub):
    target, library = stub
    memory = torch.zeros(8, dtype=torch.int64)
    before = library.stub_launches()
    work = target.list([store(memory, 0, 1)] * 5)
    for _ in range(3):
        work.run()
    assert library.stub_launches() - before == 3 * 5


@pytest.mark.parametrize("capability, overlapped", ((8, False), (9, True), (12, True)))
def test_launches_overlap_where_a_gpu_can(stub, tmp_path, capability, overlapped):
    target, library = stub
    library.stub_capability(capability)
    later = Device(
        name="later",
        driver=Driver(library._name),
        compile=lambda kernel: b"code",
        products=None,
        torch_device=torch.device("cpu"),
    )
    library.stub_overlapped.restype = ctypes.c_bool
    later.run([store(torch.zeros(8, dtype=torch.int64), 0, 1)])
    assert library.stub_overlapped() is overlapped


@pytest.mark.parametrize("source", sorted(compiler.KERNELS.glob("*.cu*")), ids=lambda one: one.name)
def test_every_kernel_waits_for_the_launches_before_it(source):
    text = source.read_text()
    kernels = KERNEL.findall(text)
    assert len(kernels) == len(re.findall(r"^LSQ_KERNEL", text, re.MULTILINE))
    assert all(first == "wait_for_launches();" for first in kernels)


def test_a_kernel_that_a_file_does_not_have_is_named(emulated):
    with pytest.raises(RuntimeError, match="lsq_absent"):
        emulated.run([launch(STORE, "lsq_absent", grid=1)])


class Contexts:
    """Which context of the emulated driver is current in this thread, and how to change that."""

    def __init__(self):
        self._library = ctypes.CDLL(str(emulator.build_driver()))

    def current(self) -> int | None:
        found = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(found))
        return found.value

    def set(self, number: int) -> int:
        """Make that of a device current; it."""
        found = ctypes.c_void_p()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(found), number)
        self._library.cuCtxSetCurrent(found)
        return found.value


def test_a_fresh_thread_loads_and_launches_and_is_left_without_a_context():
    memory = torch.zeros(6, dtype=torch.int64)
    device = cuda.emulated_device.__wrapped__()  # nothing is loaded yet

    def work():
        device.run([store(memory, 0, 1)])
        with device.driver.current():
            inside = Contexts().current()
        return inside, Contexts().current()

    with ThreadPoolExecutor(1) as pool:
        inside, after = pool.submit(work).result()
    assert memory[0] == 1 and inside is not None and after is None


def test_a_list_runs_on_its_own_device_whichever_is_current(emulated):
    memory = torch.zeros(6, dtype=torch.int64)
    device = Device(
        name="second",
        driver=Driver(str(emulator.build_driver()), 1),
        compile=emulated._compile,
        products=None,
        torch_device=torch.device("cpu"),
    )

    def work():
        contexts = Contexts()
        first = contexts.set(0)
        with device.driver.current():
            own = contexts.current()
        device.run([store(memory, 0, 1)])
        return first, own, contexts.current()

    with ThreadPoolExecutor(1) as pool:
        first, own, after = pool.submit(work).result()
    assert memory[0] == 1 and own != first == after


def test_a_device_that_is_not_there_is_named():
    driver = Driver(str(emulator.build_driver()), 7)  # makes no context yet
    with (
        pytest.raises(
            RuntimeError,
            match=r"the context of GPU 7 cannot be used: CUDA_ERROR_INVALID_DEVICE \(101\)",
        ),
        driver.current(),
    ):
        pass


def test_a_missing_driver_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="the NVIDIA driver cannot be opened: .*absent"):
        Driver(str(tmp_path / "absent.so"))


def test_a_launcher_that_is_not_built_or_of_other_sources_is_refused(monkeypatch, tmp_path):
    build = runtime.library.__wrapped__
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "later.cpp").write_text("// another signature")
    with pytest.raises(
        RuntimeError, match=r"libruntime.so was built from other C\+\+ sources.*make library"
    ):
        build()
    monkeypatch.setattr(runtime, "LIBRARY", tmp_path / "libruntime.so")
    with pytest.raises(RuntimeError, match="libruntime.so is not built; install g"):
        build()
