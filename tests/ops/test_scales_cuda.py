"""Scales that are written before anything is rounded, on CUDA: kernels in the emulator, or on a
GPU."""

import math

import pytest
import torch

from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.rounding import Round
from lsq.ops.scales import TOGETHER
from lsq.program.values import Coded
from tests.ops.attentions import attention
from tests.ops.compare import empty, to_round
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_project import rounded_project
from tests.ops.test_scales import scales


@pytest.mark.parametrize("count", [1, 2, TOGETHER])
def test_all_scales_of_a_pass(count):
    compare_cuda(scales([0.5 + number for number in range(count)]))


def rounding(kind: str, value: float):
    """An operation that rounds the rows of several blocks, and `value` among what it reads."""
    if kind == "attention":
        forward = attention((80, 70), coded=False, to=to_round(150, 16, 0.8))
        forward.heads.q.rows.floats[140, 3] = value
        return forward
    if kind == "project":
        forward = rounded_project(600)
        forward.bias[5] = value
        return forward
    x, coded = torch.randn(600, 48), to_round(600, 48, 0.8)
    x[500, 3] = value
    if kind == "round":
        return Round(x=x, rounded=coded)
    weight, rstd = torch.randn(48), empty(600)
    return ResidualNorm(sum=ResidualSum(residual=x), weight=weight, rstd=rstd, rounded=coded)


@pytest.mark.parametrize("kind", ["round", "project", "attention", "norm"])
def test_a_scale_that_stands_there_is_changed_by_a_nan_alone(kind):
    for value in (0.5, math.nan):
        operation = rounding(kind, value)
        finished = run(operation).rounded
        rounded: Coded = operation.rounded
        rounded.scale, rounded.started = torch.tensor([0.25]), True
        found = run(operation).rounded
        assert torch.equal(found.codes, finished.codes)
        assert found.scale.isnan() if math.isnan(value) else found.scale.item() == 0.25
