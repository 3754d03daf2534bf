"""Products of more inner elements than one int32 sum has room for, on the CPU and on CUDA.

All codes are 127, or nearly so: sums of all of them are beyond int32.
"""

import pytest
import torch

from lsq import gemm
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

LONG = gemm.LARGEST_INNER + 24  # Two parts that are not equal.
ROWS, COLUMNS = 5, 48
WAYS = [("plain", 0), *((kernel, 32) for kernel in tiles.INSTRUCTIONS if kernel != "plain")]


def codes(rows: int, columns: int) -> torch.Tensor:
    """int8 [M, N]: 127, but a few 1 that depend on the place."""
    found = torch.full((rows, columns), 127, dtype=torch.int8)
    found[torch.rand(rows, columns) < 0.01] = 1
    return found


def rounded_gradient(rows: int, columns: int) -> RoundedGradient:
    """With scales that keep products near one."""
    scales = {"scale": 1e-9 * (1 + torch.rand(rows)), "weight_scale": 1 + torch.rand(columns)}
    given = codes(rows, columns)
    return RoundedGradient(format=GRADIENT, codes=given, **scales, key=KEY, subsequence=1)


def coded(rows: int, columns: int) -> Coded:
    """None of which was clipped."""
    clipped = torch.zeros(-(-rows * columns // 8), dtype=torch.uint8)
    scales = {"scale": torch.tensor([1e-4]), "clip": torch.tensor([127e-4])}
    return Coded(format=format_of(), codes=codes(rows, columns), **scales, clipped=clipped)


def weight(rows: int, columns: int, in_out: bool = False) -> Weight:
    """None of which is clipped."""
    given, scale = codes(rows, columns), 1e-5 * (1 + torch.rand(rows))
    values = given * scale[:, None]
    return Weight(
        format=weight_format_of(),
        codes=given,
        scale=scale,
        values=values.t().contiguous() if in_out else values,
        clip=128 * scale,
        in_out=in_out,
    )


def project(rounded: bool) -> Project:
    """Of many inputs."""
    out = {"rounded": to_round(ROWS, COLUMNS, 3.0)} if rounded else {"out": empty(ROWS, COLUMNS)}
    x = Rows(coded=coded(ROWS, LONG))
    return Project(x=x, weight=weight(COLUMNS, LONG), bias=torch.randn(COLUMNS), **out)


def input_gradient(rounded: bool) -> ProjectInputGradient:
    """Of many outputs."""
    out = {"rounded": gradient_to_round(ROWS, COLUMNS)} if rounded else {"dx": empty(ROWS, COLUMNS)}
    return ProjectInputGradient(
        gradient=rounded_gradient(ROWS, LONG),
        weight=weight(LONG, COLUMNS).bare(),
        x=coded(ROWS, COLUMNS),
        sum=empty(COLUMNS),
        dclip=empty(1),
        **out,
    )


def weight_gradient(in_out: bool) -> ProjectWeightGradient:
    """Of many rows."""
    given = weight(32, COLUMNS, in_out)
    return ProjectWeightGradient(
        gradient=rounded_gradient(LONG, 32),
        x=Rows(coded=coded(LONG, COLUMNS)),
        weight=given,
        key=KEY,
        subsequence=5,
        dweight=empty(*given.values.shape),
        dclip=empty(32),
    )


@pytest.fixture(params=[*WAYS, "emulator", pytest.param("gpu", marks=pytest.mark.gpu)], ids=str)
def run_in_parts(request, monkeypatch):
    """Compare with the reference: on the CPU by each way to multiply, and by kernels."""
    if isinstance(request.param, tuple):
        with multiplied(*request.param):
            yield compare
    else:
        monkeypatch.setattr(cuda, "place", request.param)
        yield cuda.compare_cuda


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("made", [project, input_gradient, weight_gradient])
def test_products_in_parts(made, option, run_in_parts):
    run_in_parts(made(option))


def test_sums_of_the_reference():
    a, b = codes(3, LONG), codes(4, LONG)
    found, exact = gemm.reference(a, b).double(), a.double() @ b.double().t()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0.0)
