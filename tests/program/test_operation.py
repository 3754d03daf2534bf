"""What every operation has without saying so: its name, inputs and outputs, rounding, storing,
refusals, and a CUDA side in a file beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lsq.ops
from lsq.native.sources import LibraryError
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.vocabulary_loss import Prediction, VocabularyLoss
from lsq.program.declare import Floats, In, Out
from lsq.program.operation import Operation
from lsq.program.values import Rows, Weight
from tests.ops.compare import dropout_of, empty, rounded, to_round

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


class Sum(Operation):
    a: In[Floats]
    b: In[Floats] | None
    out: Out[Floats]
    copy: Out[Floats] | None

    def reference(self):
        total = self.a if self.b is None else self.a + self.b
        return {"out": total} if self.b is None else {"out": total, "copy": total}


def norm(rounded=None, **fields) -> ResidualNorm:
    return ResidualNorm(
        sum=ResidualSum(residual=torch.randn(3, 8), z=empty(3, 8), **fields), rounded=rounded
    )


def test_inputs_and_outputs_are_the_tensors_that_are_there():
    mask, coded = dropout_of(0.5), to_round(3, 8, 1.0)
    one = norm(update=torch.randn(3, 8), dropout=mask, rounded=coded)
    assert one.name == "ResidualNorm"
    read = one.sum.residual, one.sum.update, mask.key, coded.clip
    written = one.sum.z, coded.codes, coded.scale, coded.clipped, coded.seen
    for found, expected in ((one.inputs, read), (one.outputs, written)):
        assert len(found) == len(expected) and all(
            a is b for a, b in zip(found, expected, strict=True)
        )


def test_what_is_rounded_under_a_clip():
    coded, unlearned = to_round(3, 8, 1.0), to_round(3, 8, 1.0)
    unlearned.clip = None
    assert norm(rounded=coded).rounding() is coded
    assert norm().rounding() is norm(rounded=unlearned).rounding() is None
    weight = Weight(format=None, codes=torch.zeros(16, 16, dtype=torch.int8), scale=torch.ones(16))
    given = Prediction(
        x=Rows(coded=rounded(3, 16)),  # which is read
        weight=weight,
        target=torch.zeros(3, dtype=torch.int64),
        vocabulary=5,
        padding=1,
        smoothing=0.0,
    )
    loss = VocabularyLoss(prediction=given, loss=empty(1), nll=empty(1))
    assert loss.rounding() is None


def test_what_an_operation_does_not_have_is_refused_by_name():
    one = Sum(a=torch.ones(2), out=torch.zeros(2))
    assert tuple(one.cpu_scratch()) == tuple(one.cuda_scratch()) == one.leave_sums(None) == ()
    with pytest.raises(ValueError, match="operation Sum has no CUDA implementation"):
        one.cuda()
    with pytest.raises(NotImplementedError, match="Sum has no gradient"):
        one.gradient(None)
    with pytest.raises(LibraryError, match="lsq_Sum"):
        one.cpu()


# CUDA sides lie in files beside operations


@pytest.mark.thorough
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
