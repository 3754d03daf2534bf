"""What a kernel does that would end a process ends its launch, with words, and nothing else."""

import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lsq.emulator import build
from tests.emulator.emulated import Module, fails, memory

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other processors raise other signals"
)
ROOT = Path(__file__).parents[2]
LAUNCH_FAILED = 719
CRASHES = (
    r"reads or writes what is not its memory \(SIGSEGV\), at 0x10",
    r"divides by zero \(SIGFPE\)",
    r"illegal instruction.*SIGILL",
    r"calls abort.*SIGABRT",
    r"calls abort.*SIGABRT",
    "needs more stack than it has",
)


@pytest.mark.parametrize("switch", ["own", pytest.param("ucontext", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind, message", list(enumerate(CRASHES)))
def test_a_crash_ends_its_launch_alone(kind, message, switch, monkeypatch):
    if switch == "ucontext":
        monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DEMULATOR_UCONTEXT"])
    module = Module("faulty.cu")
    where = r"kernel crash, block \(1, 0, 0\): thread \(37, 0, 0\)"
    for _ in range(3):
        with fails(f"{where} .*{message}", LAUNCH_FAILED):
            module.launch("crash", 3, 64, memory(192), kind)
    out = memory(192)
    module.launch("crash", 3, 64, out, 9)
    assert list(out) == [1] * 192


def test_a_crash_in_any_thread_of_the_process():
    def launch(_):
        with fails("SIGSEGV"):
            Module("faulty.cu").launch("crash", 3, 64, memory(192), 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(launch, range(4)))


def test_crashes_outside_of_kernels_end_the_process_as_before():
    code = """if True:
        import faulthandler, signal
        from tests.emulator.emulated import *
        faulthandler.enable()
        try:
            Module("faulty.cu").launch("crash", 3, 64, memory(192), 0)
        except CudaError:
            print("caught", flush=True)
        ctypes.string_at(16)
    """
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == -signal.SIGSEGV and child.stdout == "caught\n"
    assert "Segmentation fault" in child.stderr and "string_at" in child.stderr
