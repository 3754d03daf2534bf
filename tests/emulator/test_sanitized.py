"""Tests of kernels once more, in a child process, under AddressSanitizer and
UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.sanitizers import sanitizer_environment

ROOT = Path(__file__).resolve().parents[2]
STEPS = "tests/ops/test_product_kernels_cuda.py::test_fewer_steps_than_stages_and_more"
EVERY_KERNEL = (
    "tests/layers/test_programs_cuda.py",
    "tests/ops/test_rounding.py",
    "tests/ops/test_adam.py",
    "tests/ops/test_aggregate.py::test_sums_on_cuda[emulator-41-48-options4-dtype0]",
    "tests/ops/test_aggregate.py::test_gradients_on_cuda[emulator-41-48-options2-dtype0]",
    f"{STEPS}[emulator-tiles of 64 x 64, 3 stages-4]",
    f"{STEPS}[emulator-tiles of 64 x 64 by wgmma, 3 stages-4]",
    "tests/ops/test_project_fields_cuda.py::test_epilogues_are_those_of_int8[emulator-0-3-41]",
    "tests/ops/test_gradient_messages.py::test_blocks[emulator-256]",
    "tests/ops/test_gradient_messages.py::test_blocks[emulator-1024]",
    "tests/ops/test_next_words.py::test_any_inner_width_on_cuda[emulator-80]",
    "tests/ops/test_cached_attention.py::test_blocks_share_long_lists_on_cuda[emulator-lengths0-True]",
)
"""Together these launch every kernel: whole programs, and the operations that no program has."""


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def repeated(files):
    """The finished child process that repeats tests of kernels; pytest leaves what sanitizers write
    where it is."""
    environment = (
        os.environ | sanitizer_environment() | {"TEST_SANITIZE": "1", "OMP_NUM_THREADS": "1"}
    )
    options = [
        "-q",
        "-x",
        "--capture=sys",
        "-p",
        "no:cacheprovider",
        "-k",
        "(cuda or emulator) and not gpu",
    ]
    command = [sys.executable, "-m", "pytest", *options, *files]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.thorough
def test_a_fault_that_ends_the_process_is_named(tmp_path):
    test = tmp_path / "test_a_fault_on_cuda.py"
    test.write_text("""\
from tests.emulator.emulated import Module, memory
def test_on_cuda():
    Module("faulty.cu", sanitize=True).launch("write_beyond", 1, 64, memory(64), 1)
""")
    done = repeated([str(test)])
    assert (
        done.returncode
        and "heap-buffer-overflow" in done.stderr
        and "in write_beyond" in done.stderr
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(EVERY_KERNEL, id="every kernel", marks=pytest.mark.slow),
        pytest.param(
            ("tests/ops", "tests/layers/test_programs_cuda.py"),
            id="every test",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_touch_no_memory_but_their_own(files):
    done = repeated(files)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    assert " passed" in done.stdout
