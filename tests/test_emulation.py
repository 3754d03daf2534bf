"""`lsq doctor --emulate`: every CUDA operation of training against its reference, and what is said of a wrong one."""

import dataclasses
import shutil

import pytest
import torch

from lsq import emulation
from lsq.cli import main
from lsq.csrc import device as csrc_device
from lsq.csrc import emulator
from lsq.ops import device

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_every_operation_agrees(capsys):
    assert main(["doctor", "--emulate"]) == 0
    shown = capsys.readouterr().out
    names = {operation.name for program in emulation.programs() for operation in program.operations}
    assert all(f"\n{name} " in "\n" + shown for name in names)
    assert "DIFFERS" not in shown and "none differ from their references" in shown


def test_one_that_is_wrong_is_named(monkeypatch, capsys):
    program = next(found for found in emulation.programs() if any(o.name == "add" for o in found.operations))

    def broken(operation):
        if operation.name != "add":
            return operation
        right = operation.definition
        wrong = dataclasses.replace(right, cuda=lambda a, b, out: right.cuda(a, a, out))
        return dataclasses.replace(operation, definition=wrong)

    operations = tuple(map(broken, program.operations))
    monkeypatch.setattr(emulation, "programs", lambda: [dataclasses.replace(program, operations=operations)])
    assert main(["doctor", "--emulate"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if "DIFFERS" in line] == ["add"]


@pytest.mark.parametrize("found, wanted, floats, integers", [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0, None),
    (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 0.25, None),
    (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), float("inf"), None),
    (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), None, 0.0),
    (torch.tensor([2, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), None, 1.0),
    (torch.tensor([1, 1], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), None, float("inf")),
])
def test_differences(found, wanted, floats, integers):
    if floats is not None:
        assert emulation._of_floats(found, wanted) == floats
    else:
        assert emulation._of_integers(found, wanted) == integers


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    for cached in (device.emulated, csrc_device.emulated_driver, emulator._compiler_version):
        cached.cache_clear()
    assert main(["doctor", "--emulate"]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("lsq doctor: the C++ compiler '/nonexistent/compiler'") and "\n" not in said
    device.emulated.cache_clear()
