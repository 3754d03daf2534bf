"""Every test of kernels once more, in a child process, under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lsq.csrc import emulator

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_touch_no_memory_but_their_own():
    environment = os.environ | emulator.sanitizer_environment() | {"TEST_SANITIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cuda and not gpu"]
    done = subprocess.run([*command, "tests/ops"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    assert " passed" in done.stdout
