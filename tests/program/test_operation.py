"""What every operation has without saying so: its name, inputs and outputs, rounding, storing,
refusals."""

from __future__ import annotations

import pytest
import torch

from lsq.native.sources import LibraryError
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.vocabulary_loss import Prediction, VocabularyLoss
from lsq.program.declare import Floats, In, Out
from lsq.program.operation import Operation
from lsq.program.values import Rows, Weight
from tests.ops.compare import dropout_of, empty, rounded, to_round


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
    coded = to_round(3, 8, 1.0)
    assert norm(rounded=coded).rounding() is coded
    assert norm().rounding() is None
    unlearned = to_round(3, 8, 1.0)
    unlearned.clip = None
    assert norm(rounded=unlearned).rounding() is None


def test_a_value_that_is_read_is_not_rounded_here():
    weight = Weight(format=None, codes=torch.zeros(16, 16, dtype=torch.int8), scale=torch.ones(16))
    given = Prediction(
        x=Rows(coded=rounded(3, 16)),
        weight=weight,
        target=torch.zeros(3, dtype=torch.int64),
        vocabulary=5,
        padding=1,
        smoothing=0.0,
    )
    loss = VocabularyLoss(prediction=given, loss=empty(1), nll=empty(1))
    assert loss.rounding() is None


def test_results_are_stored_where_they_are_wanted():
    one = Sum(a=torch.ones(2), b=torch.ones(2), out=torch.zeros(2))
    one.store(one.reference())
    assert one.out.tolist() == [2, 2]
    one.copy = torch.zeros(2)
    one.store(one.reference())
    assert one.copy.tolist() == [2, 2]
    one.b = None
    with pytest.raises(KeyError, match="copy"):
        one.store(one.reference())


def test_what_an_operation_does_not_have_is_refused_by_name():
    one = Sum(a=torch.ones(2), out=torch.zeros(2))
    assert tuple(one.cpu_scratch()) == tuple(one.cuda_scratch()) == ()
    with pytest.raises(ValueError, match="operation Sum has no CUDA implementation"):
        one.cuda()
    with pytest.raises(NotImplementedError, match="Sum has no gradient"):
        one.gradient(None)
    with pytest.raises(LibraryError, match="lsq_Sum"):
        one.cpu()
