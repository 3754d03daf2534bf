"""RMSNorm and its gradient on CUDA: kernels in the emulator, or on a GPU."""

import copy
import math

import pytest
import torch

from lsq.native import compiler
from lsq.program.values import dropped
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, compare_cuda, in_dtype, run
from tests.ops.test_residual_norm import CLIP, sum_of
from tests.ops.test_residual_norm_cuda import compare_in_parts
from tests.ops.test_rms_norm import rms, rms_gradient

SHAPES = [(1, 48), (7, 48), (341, 48), (7, 1040)]


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_a_norm_alone(rows, columns):
    operation = rms(torch.randn(rows, columns), rounds=True, error=True)
    compare_cuda(operation)
    operation.sum.z = operation.out = operation.rounded.error = None
    compare_cuda(operation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout, bits", [(0.0, 8), (0.3, 4)])
def test_a_norm_of_a_sum(dtype, dropout, bits):
    """The norm of the sum as it was stored."""
    together = rms(
        torch.randn(41, 48),
        torch.randn(41, 48),
        rounds=True,
        error=True,
        dropout=dropout,
        bits=bits,
    )
    # The reference does not round z, so that its codes may differ where z is stored in half
    # precision.
    found = compare_cuda(together) if dtype == torch.float32 else run(in_dtype(together, dtype))
    parts = in_dtype(together, dtype).sum
    summed = parts.residual.float() + dropped(parts.update.float(), parts.dropout)
    assert torch.equal(found.sum.z, summed.to(dtype))
    alone = copy.copy(together)
    alone.sum = sum_of(found.sum.z.float())
    for one, other in zip(found.outputs, compare_cuda(alone, dtype).outputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 6])
def test_what_is_not_finite_stays_in_its_row(value, row):
    x = torch.randn(7, 48)
    x[row, 5] = value
    found = compare_cuda(rms(x, rounds=True))
    assert found.out.isnan().any(1).nonzero().flatten().tolist() == [row]
    assert found.rounded.scale.isnan() and found.rounded.codes.any(1).sum() >= 6


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_a_norm(rows, columns, direct):
    compare_cuda(rms_gradient(on_cpu(rms(torch.randn(rows, columns))), direct=direct))


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounds", [False, True])
def test_gradients_of_every_shape(rows, columns, rounds):
    forward = on_cpu(rms(torch.randn(rows, columns), torch.randn(rows, columns), dropout=0.1))
    compare_cuda(rms_gradient(forward, rounds=rounds))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_in_half_precision(dtype, dropout):
    z = torch.randn(41, 48).to(dtype).float()
    forward = on_cpu(rms(z, torch.zeros(41, 48), dropout=dropout))
    compare_in_parts(rms_gradient(forward, rounds=dropout > 0), dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(value):
    forward = on_cpu(rms(torch.randn(7, 48), torch.randn(7, 48)))
    operation = rms_gradient(forward, rounds=True, direct=False)
    operation.dout[3, 5] = value
    found = compare_cuda(operation).sum
    assert not found.dresidual[3].isfinite().any()
    assert found.rounded.scale.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(dtype):
    forward = compare_cuda(
        rms(torch.empty(0, 48), torch.empty(0, 48), rounds=True, dropout=0.1), dtype
    )
    assert forward.rounded.scale.item() == pytest.approx(CLIP / 127)
    found = compare_cuda(rms_gradient(forward), dtype)
    assert not found.dweight.any() and not found.sum.dupdate_sum.any()


def test_a_width_that_kernels_do_not_have_is_refused():
    with pytest.raises(
        ValueError, match="rows of 47 values cannot run on CUDA: the width must be a multiple of 8"
    ):
        run(rms(torch.randn(7, 47)))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile_without_spills(target):
    for columns, lanes in ((512, 32), (1024, 64)):
        defines = (
            ("COLUMNS", columns),
            ("FLOAT", 1),
            ("LANES", lanes),
            ("NORM_SUMS", 1),
            ("ROUNDED", 1),
        )
        found = compiler.compile_kernels("residual_norm.cu", defines, target).resources
        assert len(found) == 2 and not any(taken.spill_bytes for taken in found.values())
