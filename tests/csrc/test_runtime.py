"""The launcher: what it launches, in which order, with which arguments, and what it says when something fails."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lsq.backends import cuda
from lsq.csrc import runtime, sources
from lsq.csrc.launch import TICKET, launch
from lsq.csrc.runtime import Driver

FAULTY = str(Path(__file__).parent / "kernels" / "faulty.cu")
BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def emulated():
    return cuda.emulated_device()


@pytest.fixture
def stub(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("stub").stub_device(tmp_path)


def store(slots, first, *values):
    """A launch that writes `values` into slots from `first` on."""
    padded = (*values, *[0] * (8 - len(values)))
    return launch("slots.cu", "lsq_store_slots", slots, first, len(values), *padded, grid=1, block=32)


def test_entries_run_in_order_with_their_arguments(emulated):
    memory = torch.zeros(6, dtype=torch.int64)
    emulated.run([store(memory, 0, 1, -2, 2**62), store(memory, 2, 7), store(memory, 5, -1)])
    assert memory.tolist() == [1, -2, 7, 0, 0, -1]


def test_slots_are_given_anew_and_kept(emulated):
    example, other = torch.zeros(2, 8, dtype=torch.int64)
    work = emulated.list([store(example, 0, 5)], slots={"memory": example})
    work.run(memory=other)
    assert (example[0], other[0]) == (0, 5)
    other.zero_()
    work.run()
    assert (example[0], other[0]) == (0, 5)
    work.store(memory=example)
    assert example[0] == 0
    work.run()
    assert example[0] == 5


def test_many_slots_and_numbers(emulated):
    tensors = {f"t{number}": torch.zeros(2, dtype=torch.int64) for number in range(19)}
    work = emulated.list([store(tensor, 0, number) for number, tensor in enumerate(tensors.values())], slots=tensors)
    fresh = {name: torch.zeros(2, dtype=torch.int64) for name in tensors}
    work.run(**fresh)
    assert [int(tensor[0]) for tensor in fresh.values()] == list(range(19))
    assert not any(tensor.any() for tensor in tensors.values())

    key = torch.zeros(1, dtype=torch.int64)
    read_back = emulated.list([store(key, 0, 11)], numbers={"key": key})
    read_back.run(key=3)
    assert key[0] == 0, "the slot itself stands in the place of the tensor"
    assert read_back._slots[0] == 11


def test_a_list_whose_kernel_crashed_runs_again(emulated):
    crashes, parts, out = torch.ones(4), torch.zeros(4), torch.zeros(4)
    entry = launch(FAULTY, "last_of_three", crashes, TICKET, parts, out, grid=3, block=1)
    work = emulated.list([entry], title="sum")
    with pytest.raises(RuntimeError, match=r"sum: last_of_three.*, block \(1, 0, 0\): thread .*SIG(ILL|TRAP)"):
        work.run()
    for tensor in (crashes, parts):
        tensor.zero_()
    work.run()
    assert out[0] == 3


@pytest.mark.parametrize("given, message", [
    ({"memory": torch.zeros(7, dtype=torch.int64)}, r"memory is torch.int64 \[7\]; the list was made for .* \[8\]"),
    ({"memory": torch.zeros(8)}, "memory is torch.float32"),
    ({"other": torch.zeros(8)}, r"was given \['other'\]; this list needs \['memory'\]"),
])
def test_values_that_do_not_fit_are_refused(emulated, given, message):
    example = torch.zeros(8, dtype=torch.int64)
    work = emulated.list([store(example, 0, 5)], slots={"memory": example})
    with pytest.raises(ValueError, match=message):
        work.run(**given)


@pytest.mark.parametrize("tensor, message", [
    (torch.zeros(16, dtype=torch.int64)[1:], "begins 8 bytes after a multiple of 16"),
    (torch.zeros(4, 4, dtype=torch.int64).t(), r"strides \(1, 4\) is not contiguous"),
    (torch.zeros(8, dtype=torch.int64, device="meta"), "lies on meta, but this list runs on cpu"),
])
def test_tensors_that_kernels_cannot_take_are_refused(emulated, tensor, message):
    with pytest.raises(ValueError, match=message):
        emulated.list([store(tensor, 0, 1)])


def test_a_slot_that_no_launch_has_is_refused(emulated):
    with pytest.raises(ValueError, match="no launch of the list has x among its arguments"):
        emulated.list([store(torch.zeros(8, dtype=torch.int64), 0, 1)], slots={"x": torch.zeros(8, dtype=torch.int64)})


def test_a_failed_launch_is_named(emulated, stub):
    memory = torch.zeros(8, dtype=torch.int64)
    target, library = stub
    work = target.list([store(memory, 0, 1), store(memory, 0, 2)], title="quantize")
    work.run()
    library.stub_fail(1)
    with pytest.raises(RuntimeError, match=(
        r"entry 1 of 2, quantize: lsq_store_slots, grid \(1, 1, 1\), block \(32, 1, 1\), 0 bytes of dynamic shared "
        r"memory: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"
    )):
        work.run()
    too_large = launch("slots.cu", "lsq_store_slots", memory, 0, 1, *[0] * 8, grid=1, block=2048)
    with pytest.raises(RuntimeError, match="lsq_store_slots.*2048"):
        emulated.run([too_large])


def test_every_entry_is_launched_once_a_run(stub):
    target, library = stub
    memory = torch.zeros(8, dtype=torch.int64)
    before = library.stub_launches()
    work = target.list([store(memory, 0, 1)] * 5, slots={"memory": memory})
    for _ in range(3):
        work.run(memory=memory)
    work.run()
    assert library.stub_launches() - before == 3 * 6 + 5


def test_a_kernel_that_a_file_does_not_have_is_named(emulated):
    with pytest.raises(RuntimeError, match="lsq_absent"):
        emulated.run([launch("slots.cu", "lsq_absent", grid=1)])


def test_a_missing_driver_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="the NVIDIA driver cannot be opened: .*absent"):
        Driver(str(tmp_path / "absent.so"))


def test_a_launcher_that_is_not_built_or_of_other_sources_is_refused(monkeypatch, tmp_path):
    build = runtime.library.__wrapped__
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "later.cpp").write_text("// another signature")
    with pytest.raises(RuntimeError, match=r"libruntime.so was built from other C\+\+ sources.*make library"):
        build()
    monkeypatch.setattr(runtime, "LIBRARY", tmp_path / "libruntime.so")
    with pytest.raises(RuntimeError, match="libruntime.so is not built; install g"):
        build()
