"""ResidualNorm and its gradient on CUDA: kernels in the emulator, or on a GPU."""

import copy
import math

import pytest
import torch

from lsq.native import compiler
from lsq.native.geometry import sums_in_shared_memory
from lsq.ops.residual_norm import ResidualNormGradient, ResidualSumGradient
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, compare_cuda, in_dtype, run
from tests.ops.test_residual_norm import BOTH, CLIP, norm, norm_gradient, sum_of

SHAPES = [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout, bits", [(0.0, 8), (0.3, 4)])
def test_a_sum_and_its_norm(norm, dtype, dropout, bits):
    """z alone, then the norm of z as it was stored."""
    update, residual = torch.randn(41, 48), torch.randn(41, 48)
    z = compare_cuda(norm(residual, update, kind=None, dropout=dropout), dtype).sum.z
    alone = norm(z.float(), rounds=True, error=True, bits=bits)
    together = copy.copy(alone)
    together.sum = sum_of(residual, update, dropout)
    # The reference does not round z, so that its codes may differ where z is stored in half
    # precision.
    found = compare_cuda(together) if dtype == torch.float32 else run(in_dtype(together, dtype))
    wanted = compare_cuda(alone, dtype)
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert torch.equal(one, other)


@BOTH
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_a_norm_alone(norm, rows, columns):
    operation = norm(torch.randn(rows, columns), rounds=True, error=True)
    compare_cuda(operation)
    operation.sum.z = operation.out = operation.rounded.error = None
    compare_cuda(operation)


@BOTH
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalised_rows_as_codes(norm, dtype, rows, columns):
    operation = norm(torch.randn(rows, columns).to(dtype).float(), keeps=True)
    compare_cuda(operation, dtype)
    compare_cuda(norm_gradient(on_cpu(operation)), dtype)


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 6])
def test_what_is_not_finite_stays_in_its_row(norm, value, row):
    x = torch.randn(7, 48)
    x[row, 5] = value
    found = compare_cuda(norm(x, rounds=True, keeps=True))
    assert found.normalised.scale.isnan().nonzero().flatten().tolist() == [row]
    assert found.out.isnan().any(1).nonzero().flatten().tolist() == [row]
    codes = found.rounded.codes
    assert found.rounded.scale.isnan() and not codes[row].all() and codes.any(1).sum() >= 6


@BOTH
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_a_norm(norm, rows, columns, direct):
    compare_cuda(norm_gradient(on_cpu(norm(torch.randn(rows, columns))), direct=direct))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounds", [False, True])
def test_gradients_of_every_shape(kind, rows, columns, rounds):
    compare_gradients(torch.float32, rows, columns, rounds=rounds, kind=kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "layer", "rms"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_with_an_update(dtype, kind, rounds, dropout):
    compare_gradients(dtype, 41, 48, rounds=rounds, kind=kind, dropout=dropout)


def compare_gradients(dtype, rows, columns, *, rounds, kind="layer", dropout=0.1):
    """Gradients of a norm of a sum, or of the sum alone."""
    z, update = torch.randn(rows, columns).to(dtype).float(), torch.zeros(rows, columns)
    forward = on_cpu(norm(z, update, kind=kind, dropout=dropout))
    whole = norm_gradient(forward, rounds=rounds)
    if dtype == torch.float32 or kind is None:
        compare_cuda(whole, dtype)
    else:
        compare_in_parts(whole, dtype)


def compare_in_parts(whole, dtype):
    """Gradients of a norm of a sum, in half precision."""
    # What is handed to the product is the gradient as it was stored: compared with the reference on
    # that alone.
    found = run(in_dtype(whole, dtype))
    above, below = copy.copy(whole), copy.copy(whole.sum)
    above.sum = ResidualSumGradient(dz=whole.sum.dz, dresidual=whole.sum.dresidual)
    above = compare_cuda(above, dtype)
    below.dz, below.dresidual = above.sum.dresidual.float(), None
    below = compare_cuda(ResidualNormGradient(sum=below), dtype)
    for one, other in zip(found.outputs, above.outputs + below.outputs, strict=True):
        assert torch.equal(one, other)


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(norm, value):
    forward = on_cpu(norm(torch.randn(7, 48), torch.randn(7, 48)))
    operation = norm_gradient(forward, rounds=True, direct=False)
    operation.dout[3, 5] = value
    found = compare_cuda(operation)
    assert not found.sum.dresidual[3].isfinite().any()
    assert found.sum.rounded.scale.isnan().nonzero().tolist() == [[3]]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch(norm, dtype):
    forward = compare_cuda(
        norm(torch.empty(0, 48), torch.empty(0, 48), rounds=True, dropout=0.1), dtype
    )
    assert forward.rounded.scale.item() == pytest.approx(CLIP / 127)
    found = compare_cuda(norm_gradient(forward), dtype)
    assert not found.dweight.any() and not found.sum.dupdate_sum.any()
    assert found.dbias is None or not found.dbias.any()


def test_nothing_to_do():
    """Without a norm and without an update, the gradient of z is the residual's."""
    assert not run(ResidualNormGradient(sum=ResidualSumGradient(dz=torch.randn(7, 48)))).outputs


def test_activations_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="takes one dtype"):
        run(norm(torch.randn(7, 48), torch.randn(7, 48).bfloat16(), kind=None))


def test_a_width_that_kernels_do_not_have_is_refused():
    with pytest.raises(
        ValueError, match="rows of 47 values cannot run on CUDA: the width must be a multiple of 8"
    ):
        run(norm(torch.randn(7, 47)))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("sums", [(), (("NORM_SUMS", 1),)])
def test_kernels_compile_without_spills(target, sums):
    for columns, lanes in ((512, 32), (1024, 64)):
        defines = (("COLUMNS", columns), ("FLOAT", 1), ("LANES", lanes), *sums, ("ROUNDED", 1))
        found = compiler.compile_kernels("residual_norm.cu", defines, target).resources
        assert len(found) == 2 and not any(taken.spill_bytes for taken in found.values())


@pytest.mark.parametrize("columns", [4104, 6144])
def test_sums_of_48_kib_beside_what_a_kernel_has_of_its_own(columns):
    assert sums_in_shared_memory(columns, 2) == 48 * 1024
    compare_gradients(torch.float32, 3, columns, rounds=False)
