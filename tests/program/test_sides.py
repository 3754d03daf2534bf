"""The CUDA sides of operations lie in files beside them, which programs for the CPU do not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lsq.ops
from lsq.program import cuda
from lsq.program.operation import Operation

OPS = Path(lsq.ops.__file__).parent
SIDES = sorted(path.stem for path in OPS.glob("*_cuda.py"))
STEP = """
import sys, torch, lsq
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
lsq.convert(model)
model(torch.randn(4, 64)).sum().backward()
names = [name for name in sys.modules if name.startswith("lsq.ops.")]
print([name for name in names if name.endswith(("_cuda", "launches"))])
"""


def test_a_step_on_the_cpu_loads_none():
    found = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_no_operation_imports_a_side():
    assert all(OPS.joinpath(one.removesuffix("_cuda") + ".py").exists() for one in SIDES)
    for path in OPS.glob("*.py"):
        if path.stem not in (*SIDES, "launches"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not modules & {f"lsq.ops.{one}" for one in (*SIDES, "launches")}, path


def test_a_fault_of_a_side_is_not_hidden(tmp_path, monkeypatch):
    tmp_path.joinpath("faulty.py").write_text(
        "from __future__ import annotations\n"
        "from lsq.program.operation import Operation\n\n\n"
        "class Faulty(Operation):\n    count: int = 1\n"
    )
    tmp_path.joinpath("faulty_cuda.py").write_text("import missing_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    from faulty import Faulty

    with pytest.raises(ModuleNotFoundError, match="missing_module"):
        Faulty().cuda()


def test_an_operation_without_a_side():
    class Alone(Operation):
        """Declared in this file, beside which there is none."""

        count: int = 1

    assert cuda.scratch_of(Alone()) == () == cuda.leave_sums(Alone(), None)
    with pytest.raises(ValueError, match="operation Alone has no CUDA implementation"):
        cuda.launches(Alone())
