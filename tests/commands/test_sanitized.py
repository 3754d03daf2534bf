"""Whole trainings under AddressSanitizer, UndefinedBehaviorSanitizer and LeakSanitizer."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsq.native import loader
from tests.commands.conftest import TRAINING
from tests.emulator.sanitizers import sanitizer_environment
from tests.sampling import first
from tests.test_setup import ROOT, build  # noqa: F401

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FLAGS = "-O0 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined".split()
FLAGS += ["-fno-sanitize-recover=undefined"]
OURS = re.compile(r"lsq/csrc/|/lsq/emulator/|libcpu_|libruntime")
"""Functions of ours in a line of a stack: Python and PyTorch keep some memory for good."""


@pytest.fixture
def libraries(build, tmp_path) -> Path:  # noqa: F811
    """A folder of sanitized host libraries: the launcher, and the loops for this processor."""
    for name in (Path(loader.library()._name).stem, "libruntime"):
        folder, flags = build.LIBRARIES[name]
        build.build_library(
            tmp_path / "libraries" / f"{name}.so",
            [*flags, *FLAGS],
            tmp_path / name,
            build.sources(folder),
            build.checksum(folder),
        )
    return tmp_path / "libraries"


def leaks(said: str) -> list[str]:
    """Those parts of LeakSanitizer's report that name a function of ours."""
    parts = said.split("\n\n")
    return [part for part in parts if " leak of " in part and OURS.search(part)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", first(["cpu", "emulator"], 0, 1))
def test_a_training_touches_no_memory_but_its_own(libraries, prepared, tmp_path, device):
    """Three updates and a validation, two more after it was resumed, and a translation."""
    command = ["train", str(prepared.data), "--save-dir", str(tmp_path), "--lsq-device", device]
    command += [*TRAINING, "--optimizer", "lsq_adam", "--update-freq", "2"]
    translation = ["generate", str(prepared.data), "--path", str(tmp_path / "checkpoint_best.pt")]
    translation += ["--lsq-device", device, "--beam", "2", "--max-len-a", "0", "--max-len-b", "3"]
    commands = [[*command, "--max-update", "3"], [*command, "--max-update", "5"], translation]
    environment = os.environ | sanitizer_environment()
    environment["ASAN_OPTIONS"] = (
        "detect_leaks=1:leak_check_at_exit=0:detect_stack_use_after_return=0"
    )
    environment["OMP_NUM_THREADS"] = "2"
    environment["PYTHONMALLOC"] = "malloc"  # LeakSanitizer looks for pointers in no other memory
    given = [str(libraries), json.dumps(commands)]
    program = [sys.executable, "-m", "tests.commands.sanitized", *given]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-6000:])
    assert torch.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 5
    assert "Translated 9 sentences" in done.stdout + done.stderr
    assert "detected memory leaks" in done.stderr and not leaks(done.stderr), leaks(done.stderr)
