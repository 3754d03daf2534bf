"""Kernels run in the emulator: right results in every order of threads, and words about every
planted fault."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulator.emulated import ORDERS, Driver, Module, fails, memory
from tests.emulator.sanitizers import sanitizer_environment

ROOT = Path(__file__).parents[2]
LAUNCH_FAILED = 719


def centred(order=0, rows=5, columns=300, threads=256):
    """(found, expected) of the kernel that takes the mean off each row."""
    x = torch.arange(rows * columns, dtype=torch.float32).remainder(17).reshape(rows, columns)
    out = torch.zeros_like(x)
    Module("sound.cu", order).launch("centre", rows, threads, x, out, columns, 0.5)
    return out, x - x.mean(1, keepdim=True) + 0.5


def reverses(order, barrier):
    """Whether the kernel that needs a barrier gives the right result, over three blocks."""
    x = torch.arange(3 * 96, dtype=torch.float32)
    out = torch.zeros_like(x)
    module = Module("sound.cu", order, defines=(("BARRIER", barrier),))
    module.launch("reverse", 3, 96, x, out, shared=96 * 4)
    return torch.equal(out, x.reshape(3, 96).flip(1).flatten())


@pytest.mark.parametrize("order", ORDERS)
def test_sums_of_blocks(order):
    found, expected = centred(order)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_block_sees_what_all_left(order):
    partial, ticket, total = memory(7), memory(1, ctypes.c_uint32), memory(1)
    for _ in range(2):
        total[0] = 0
        Module("sound.cu", order).launch("ticket_sum", 7, 64, partial, ticket, total)
        assert total[0] == 28 and ticket[0] == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_is_a_race(order):
    assert reverses(order, barrier=1)
    with fails(r"kernel reverse, .* (reads|writes) shared memory that warp \d (wrote|read) "):
        reverses(order, barrier=0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_barrier_that_is_missing_from_the_second_turn_on(order):
    module = Module("faulty.cu", order)
    module.launch("race", 1, 64, memory(64), 1)
    message = r"thread .* (reads|writes) shared memory that .*, after it waited at faulty.cu:\d+"
    with fails(rf"kernel race, block \(0, 0, 0\): {message}"):
        module.launch("race", 1, 64, memory(64), 0)


def test_warps_that_write_the_same_value_race():
    with fails(r"thread \(32, 0, 0\) writes shared memory that warp 0 wrote"):
        Module("faulty.cu").launch("equal_values", 1, 64, memory(64))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent_barrier", r"and 39 more: wait at __syncthreads \(.*and 23 more finished"),
        ("two_barriers", r"reach the same __syncthreads: .*\(32, 0, 0\) and 31 more: wait"),
        ("finished_lane", r"thread .* wait at __ballot_sync \(faulty.cu:\d+, mask 0xffffffff\)"),
        ("different_masks", r"calls __shfl_sync .* with mask 0x.*, but is itself lane \d+, which"),
        ("other_lanes_mask", r"calls __any_sync \(.*\) with mask 0xff, but is itself lane"),
        ("different_functions", r"the same mask and function: thread .* __all_sync .* __syncwarp"),
        ("source_not_named", r"reads lane 20 by __shfl_sync .*, which its mask 0xffff does not"),
    ],
)
def test_faults_of_synchronization(kernel, message, order):
    where = rf"kernel {kernel}, block \(0, 0, 0\): "
    with fails(f"{where}.*{message}", LAUNCH_FAILED):
        Module("faulty.cu", order).launch(kernel, 1, 64, memory(64))


def test_a_misaligned_vector():
    x, out = memory(1024), memory(64)
    module = Module("faulty.cu")
    message = r"misaligned_vector, block .* thread \(3, 0, 0\) accesses 0x\w+4 .*not aligned to 16"
    with fails(message, LAUNCH_FAILED):
        module.launch("misaligned_vector", 1, 64, x, out, 4)
    module.launch("misaligned_vector", 1, 64, x, out, 16)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        (1, 1025, 0, "blocks of 1025 x 1 x 1 threads"),
        (1, (32, 8, 5), 0, "blocks of 32 x 8 x 5 threads"),
        (1, (1, 1, 65), 0, "blocks of 1 x 1 x 65 threads"),
        (0, 32, 0, "a grid of 0 x 1 x 1 blocks"),
        ((1, 65536), 32, 0, "a grid of 1 x 65536 x 1 blocks"),
        (1, 32, 49153, r"49153 bytes of dynamic .*, which has \d+ static bytes, allows \d+"),
    ],
)
def test_launches_that_a_gpu_refuses(grid, block, shared, message):
    with fails(f"kernel places: {message}", 1):
        Module("sound.cu").launch("places", grid, block, memory(1), shared=shared)


def test_much_shared_memory_must_be_asked_for():
    module = Module("sound.cu")
    function, attribute, static = module.function("many_barriers"), 8, ctypes.c_int()
    module.driver("cuFuncGetAttribute", ctypes.byref(static), 1, function)
    usual, most = 48 * 1024 - static.value, 227 * 1024 - static.value
    with fails(f"{most + 1} bytes of dynamic shared memory; allowed are 0 to {most}"):
        module.driver("cuFuncSetAttribute", function, attribute, most + 1)
    out = memory(64)
    with fails(f"{static.value} static bytes, allows {usual} "):
        module.launch("many_barriers", 1, 64, out, shared=usual + 1)
    module.driver("cuFuncSetAttribute", function, attribute, most)
    module.launch("many_barriers", 1, 64, out, shared=most)
    assert list(out) == [9] * 64 and static.value > 0


def test_accesses_beyond_a_block_s_dynamic_shared_memory():
    out = memory(64)
    Module("faulty.cu").launch("write_beyond_dynamic", 1, 64, out, 0, shared=256)
    assert list(out) == [1] * 64
    beyond = "4 bytes from byte 256 on of dynamic shared memory, of which its block has 256"
    with fails(rf"thread \(63, 0, 0\) writes {beyond}"):
        Module("faulty.cu").launch("write_beyond_dynamic", 1, 64, out, 1, shared=256)


def test_what_is_not_there():
    with fails("no kernel absent", 500):
        Module("sound.cu").function("absent")
    with fails("not a module of the emulator", 200):
        Driver()("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b"\x7fELF")


def sanitized(source, launch):
    """The finished child process that makes one launch under the sanitizers."""
    code = "from tests.emulator.emulated import *\n"
    code += f"Module({source!r}, sanitize=True).launch({launch})\nprint('finished')"
    environment = os.environ | sanitizer_environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("'write_beyond', 1, 64, memory(64), 1", "heap-buffer-overflow"),
        ("'write_beyond_shared', 1, 32, memory(32), 1", "insufficient space|global-buffer"),
        ("'write_beyond_dynamic', 1, 64, memory(64), 1, shared=256", "use-after-poison"),
        ("'misaligned_load', 1, 8, memory(64), memory(64)", "load of misaligned address"),
        ("'copies', 1, 32, memory(380), memory(384), 128, 0", "heap-buffer-overflow"),
    ],
)
def test_sanitizers_catch(launch, message):
    child = sanitized("tensor_cores.cu" if "copies" in launch else "faulty.cu", launch)
    kernel = launch.split("'")[1]
    assert child.returncode and "finished" not in child.stdout
    assert any(word in child.stderr for word in message.split("|")) and kernel in child.stderr
