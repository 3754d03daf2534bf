"""Products of more inner elements than one int32 sum has room for, against float64, on the CPU and
on CUDA.

All codes are 127, or nearly so: sums of all of them are beyond int32.
"""

import pytest
import torch

from lsq.gemm import LARGEST_INNER
from lsq.native import tiles
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.project import Project
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.values import Coded, RoundedGradient, Rows, Weight
from lsq.quant import GRADIENT
from tests.ops import cuda
from tests.ops.compare import (
    KEY,
    compare,
    empty,
    format_of,
    gradient_to_round,
    to_round,
    weight_format_of,
)
from tests.ops.products import multiplied

LONG = LARGEST_INNER + 24
"""A multiple of 16, as CUDA takes it, and of no larger power of two; two parts that are not equal.
"""
ROWS, COLUMNS = 5, 48


def codes(rows: int, columns: int) -> torch.Tensor:
    """int8 [M, N]: 127, but a few 1 that depend on the place."""
    found = torch.full((rows, columns), 127, dtype=torch.int8)
    found[torch.rand(rows, columns) < 0.01] = 1
    return found


def rounded_gradient(rows: int, columns: int) -> RoundedGradient:
    """Codes [M, N] with scales of rows that keep products near one."""
    return RoundedGradient(
        format=GRADIENT,
        codes=codes(rows, columns),
        scale=1e-9 * (1 + torch.rand(rows)),
        weight_scale=1 + torch.rand(columns),
        key=KEY,
        subsequence=1,
    )


def coded(rows: int, columns: int) -> Coded:
    """Codes [M, N] of an activation, none of which was clipped."""
    return Coded(
        format=format_of(),
        codes=codes(rows, columns),
        scale=torch.tensor([1e-4]),
        clipped=torch.zeros(-(-rows * columns // 8), dtype=torch.uint8),
        clip=torch.tensor([127e-4]),
    )


def weight(rows: int, columns: int) -> Weight:
    """A weight [N, K], none of which is clipped."""
    given, scale = codes(rows, columns), 1e-5 * (1 + torch.rand(rows))
    return Weight(
        format=weight_format_of(),
        codes=given,
        scale=scale,
        values=given * scale[:, None],
        clip=128 * scale,
    )


def project(*, rounded: bool) -> tuple[Project, torch.Tensor]:
    """(the operation, y [M, P]): K is long."""
    out = {"rounded": to_round(ROWS, COLUMNS, 3.0)} if rounded else {"out": empty(ROWS, COLUMNS)}
    operation = Project(
        x=Rows(coded=coded(ROWS, LONG)),
        weight=weight(COLUMNS, LONG),
        bias=torch.randn(COLUMNS),
        **out,
    )
    return operation, decoded(operation.x.coded) @ decoded(operation.weight).t() + operation.bias


def input_gradient(*, rounded: bool) -> tuple[ProjectInputGradient, torch.Tensor]:
    """(the operation, dx [M, K]): N, the outputs of the weight, is long."""
    out = {"rounded": gradient_to_round(ROWS, COLUMNS)} if rounded else {"dx": empty(ROWS, COLUMNS)}
    operation = ProjectInputGradient(
        gradient=rounded_gradient(ROWS, LONG),
        weight=weight(LONG, COLUMNS).bare(),
        x=coded(ROWS, COLUMNS),
        sum=empty(COLUMNS),
        dclip=empty(1),
        **out,
    )
    return operation, decoded(operation.gradient) @ operation.weight.codes.double()


def weight_gradient(*, in_out: bool = False) -> tuple[ProjectWeightGradient, torch.Tensor]:
    """(the operation, dweight [N, K], or [K, N]): M, the rows, is long."""
    given = weight(32, COLUMNS)
    if in_out:
        given.values, given.in_out = given.values.t().contiguous(), True
    operation = ProjectWeightGradient(
        gradient=rounded_gradient(LONG, 32),
        x=Rows(coded=coded(LONG, COLUMNS)),
        weight=given,
        key=KEY,
        subsequence=5,
        dweight=empty(*given.values.shape),
        dclip=empty(*given.clip.shape),
    )
    upstream = decoded(operation.gradient) / given.scale.double()
    dweight = upstream.t() @ decoded(operation.x.coded)
    return operation, dweight.t() if in_out else dweight


def decoded(given) -> torch.Tensor:
    """Codes times their scales, in float64."""
    scale = given.scale.double()
    return given.codes.double() * (scale if scale.numel() == 1 else scale[:, None])


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the largest magnitude."""
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


EXACT = 1e-6
"""What float32 loses: a relative error of the sums and of their scales."""
WAYS = [("plain", 0), *((kernel, 32) for kernel in tiles.INSTRUCTIONS if kernel != "plain")]


@pytest.fixture(params=[*WAYS, "emulator", pytest.param("gpu", marks=pytest.mark.gpu)], ids=str)
def run_in_parts(request, monkeypatch):
    """Compare with the reference: on the CPU by each way to multiply, and by kernels."""
    if isinstance(request.param, tuple):
        with multiplied(*request.param):
            yield compare
    else:
        monkeypatch.setattr(cuda, "place", request.param)
        yield cuda.compare_cuda


def test_inputs(run_in_parts):
    operation, exact = project(rounded=False)
    assert largest_error(run_in_parts(operation).out, exact) < EXACT


def test_outputs(run_in_parts):
    operation, exact = input_gradient(rounded=False)
    found = run_in_parts(operation)
    assert largest_error(found.dx, exact) < EXACT
    assert largest_error(found.sum, exact.sum(0)) < EXACT


@pytest.mark.parametrize("in_out", [False, True])
def test_rows(in_out, run_in_parts):
    operation, exact = weight_gradient(in_out=in_out)
    # x is rounded once more, with a scale for each column: at random, without bias.
    assert largest_error(run_in_parts(operation).dweight, exact) < 1e-4


def test_codes(compared):
    operation, exact = project(rounded=True)
    scale = 3.0 / operation.rounded.largest
    codes = (exact.clamp(-3.0, 3.0) / scale).round()
    assert (compared(operation, exact=True).rounded.codes - codes).abs().max() <= 1
    operation, exact = input_gradient(rounded=True)
    found = compared(operation, exact=True).rounded
    steps = found.scale[:, None].double() / found.weight_scale
    assert ((found.codes.double() * steps - exact).abs() <= 1.001 * steps).all()
    assert torch.isfinite(found.scale).all()
