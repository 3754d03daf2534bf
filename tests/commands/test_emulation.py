"""`lsq doctor --emulate`: every CUDA operation of training against its reference, and what is said
of a wrong one."""

import shutil

import pytest
import torch

from lsq.commands import doctor
from lsq.commands.cli import main
from lsq.emulator import build
from lsq.ops.rounding import Round
from lsq.ops.sums import PartialSums
from lsq.run import backends, cuda

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_every_operation_agrees(capsys):
    assert main(["doctor", "--emulate"]) == 0
    shown = capsys.readouterr().out
    names = {operation.name for program in doctor.trained() for operation in program.operations}
    assert names >= {
        "Project",
        "ProjectWeightGradient",
        "Attention",
        "AttentionGradient",
        "Embed",
        "RoundGradient",
    }
    assert names >= {"Rotate", "RotateGradient", "Gated", "GatedGradient"}
    assert names >= {"StartScales", "FinishSums"}, "the programs are those of a GPU"
    names.add("RoundWeight")
    assert all(f"\n{name} " in "\n" + shown for name in names)
    assert "DIFFERS" not in shown and "none differ from their references" in shown


def test_one_that_is_wrong_is_named(monkeypatch, capsys):
    program = next(
        found for found in doctor.trained() if any(o.name == "Round" for o in found.operations)
    )
    monkeypatch.setattr(Round, "cuda", lambda self: [])
    monkeypatch.setattr(doctor, "trained", lambda: [program])
    assert main(["doctor", "--emulate"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if "DIFFERS" in line] == ["Round"]


def test_of_sums_that_are_left_in_parts_totals_are_compared():
    parts = torch.randn(2, 8)
    sums = {parts: PartialSums.of(parts, 4, (torch.empty(4),))}
    for change, same in (0.0, True), (1.0, False):
        found = torch.stack([parts[1] + change, parts[0]])
        ((one, other),) = doctor._comparable([parts], [found], [parts], sums)
        assert one.shape == (4,) and torch.allclose(one, other) == same


@pytest.mark.parametrize(
    "found, wanted, floats, integers",
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0, None),
        (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 0.25, None),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), float("inf"), None),
        (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), None, 0.0),
        (torch.tensor([2, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), None, 1.0),
        (
            torch.tensor([1, 1], dtype=torch.int8),
            torch.tensor([1, 3], dtype=torch.int8),
            None,
            float("inf"),
        ),
    ],
)
def test_differences(found, wanted, floats, integers):
    if floats is not None:
        assert doctor._of_floats(found, wanted) == floats
    else:
        assert doctor._of_integers(found, wanted) == integers


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    caches = backends._on_gpu, cuda.emulated_device, build._compiler_version
    for cached in caches:
        cached.cache_clear()
    assert main(["doctor", "--emulate"]) == 1
    said = capsys.readouterr().err.strip()
    assert (
        said.startswith("lsq doctor: the C++ compiler '/nonexistent/compiler'") and "\n" not in said
    )
    for cached in caches:
        cached.cache_clear()
