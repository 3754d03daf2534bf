"""ResidualNorm against torch's norms in float64, every part left out in turn."""

import copy
import functools
import math

import pytest
import torch

from lsq.native.geometry import sums_in_shared_memory
from lsq.ops.residual_norm import (
    NormalisedRows,
    ResidualNorm,
    ResidualNormGradient,
    ResidualSum,
    ResidualSumGradient,
)
from lsq.quant import NORMALISED, random
from lsq.run import backends
from tests.ops.compare import (
    KEY,
    ROWS,
    assert_as_accurate,
    assert_holds,
    compare,
    dropout_of,
    empty,
    gradient_to_round,
    on_cpu,
    refused,
    to_round,
)
from tests.ops.cuda import DTYPES, compare_cuda, in_dtype, run


def sum_of(residual, update=None, dropout=0.0) -> ResidualSum:
    """Of `residual` [M, H] and what is added to it, with z."""
    given = {"residual": residual, "update": update, "dropout": dropout_of(dropout)}
    return ResidualSum(**given, z=empty(*residual.shape))


def sum_gradient(
    forward: ResidualSum, *, normed=True, rounds=False, direct=True
) -> ResidualSumGradient:
    """Of a computed sum; `direct`: z has its own gradient, as it must without a norm."""
    rows, columns = forward.residual.shape
    updated = forward.update is not None
    return ResidualSumGradient(
        dz=torch.randn(rows, columns) if direct or not normed else None,
        dropout=forward.dropout,
        dresidual=empty(rows, columns) if normed else None,
        dupdate=empty(rows, columns) if updated and not rounds else None,
        rounded=gradient_to_round(rows, columns) if updated and rounds else None,
        dupdate_sum=empty(columns) if updated else None,
    )


COLUMNS, CLIP = 48, 1.6


def norm(
    residual, update=None, *, kind="layer", rounds=False, keeps=False, dropout=0.0, **rounding
) -> ResidualNorm:
    """LayerNorm, RMSNorm ("rms") or the sum alone (None); rounding: see `to_round`."""
    rows, columns = residual.shape
    made = ResidualNorm(sum=sum_of(residual, update, dropout))
    if kind is not None:
        made.weight = 1 + 0.2 * torch.randn(columns)
        if kind == "layer":
            made.bias, made.mean = 0.2 * torch.randn(columns), empty(rows)
        made.rstd, made.out = empty(rows), empty(rows, columns)
        made.rounded = to_round(rows, columns, CLIP, **rounding) if rounds else None
        if keeps:
            codes = empty(rows, columns, dtype=torch.int8)
            made.normalised = NormalisedRows(format=NORMALISED, codes=codes, scale=empty(rows))
    return made


def norm_gradient(forward: ResidualNorm, **options) -> ResidualNormGradient:
    """Of a computed norm, for random gradients; options: see `sum_gradient`."""
    rows, columns = forward.sum.residual.shape
    normed = forward.weight is not None
    kept = {"z": forward.sum.z, "mean": forward.mean} if normed else {}
    if forward.normalised:
        kept = {"normalised": forward.normalised}
    return ResidualNormGradient(
        dout=torch.randn(rows, columns) if normed else None,
        **kept,
        rstd=forward.rstd,
        centred=forward.mean is not None,
        weight=forward.weight,
        dweight=empty(columns) if normed else None,
        dbias=None if forward.bias is None else empty(columns),
        sum=sum_gradient(forward.sum, normed=normed, **options),
    )


rms = functools.partial(norm, kind="rms")
BOTH = pytest.mark.parametrize("norm", [norm, rms], ids=["layer", "rms"])


def by_torch(operation: ResidualNorm, x, weight, bias=None):
    """The norm of the same kind, in any dtype."""
    if operation.bias is None:
        return torch.nn.functional.rms_norm(x, x.shape[1:], weight, operation.epsilon)
    return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, operation.epsilon)


def leaves_of(forward: ResidualNorm, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a norm reads, in another dtype."""
    read = (forward.sum.residual, forward.weight, forward.bias)
    return [one.to(dtype).requires_grad_() for one in read if one is not None]


@BOTH
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 3), (41, 48), (341, 1040)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_the_norm_is_as_accurate_as_torchs(norm, rows, columns, offset):
    x = offset + torch.randn(rows, columns)
    operation = norm(x)
    found = on_cpu(operation)
    assert torch.equal(found.sum.z, x)
    centred = x.double()
    if found.mean is not None:
        centred = centred - centred.mean(1, keepdim=True)
        torch.testing.assert_close(found.mean, x.mean(1), atol=1e-6 * (1 + offset), rtol=1e-5)
    if columns > 1 or found.mean is None:
        leaves = functools.partial(leaves_of, operation)
        assert_as_accurate(
            [found.out], lambda dtype: [by_torch(operation, *leaves(dtype)).detach()]
        )
    rstd = (centred.square().mean(1) + 1e-5).rsqrt().float()
    torch.testing.assert_close(found.rstd, rstd, atol=1e-5, rtol=1e-5)


@BOTH
@pytest.mark.parametrize("rows, columns", [(1, 5), (7, 3), (41, 48), (341, 1040)])
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_the_norm_are_as_accurate_as_torchs(norm, rows, columns, direct):
    forward = norm(torch.randn(rows, columns))
    operation = norm_gradient(on_cpu(forward), direct=direct)
    found = compare(operation)

    def by_autograd(dtype):
        leaves = leaves_of(forward, dtype)
        total = (by_torch(forward, *leaves) * operation.dout.to(dtype)).sum()
        if direct:
            total = total + (leaves[0] * operation.sum.dz.to(dtype)).sum()
        return torch.autograd.grad(total, leaves)

    results = found.sum.dresidual, found.dweight, found.dbias
    assert_as_accurate([one for one in results if one is not None], by_autograd)


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal-to-noise."""
    return 10 * math.log10(exact.double().square().sum() / (found - exact).double().square().sum())


@pytest.mark.parametrize("rows, columns", [(1, 5), (7, 3), (41, 48), (341, 1040)])
def test_normalised_rows_are_kept_as_codes_of_half_a_step(rows, columns):
    found = compare(norm(3 + 2 * torch.randn(rows, columns), keeps=True))
    exact = (found.sum.z - found.mean[:, None]) * found.rstd[:, None]
    kept = found.normalised
    assert (kept.codes.abs().amax(1) == 127).all()
    assert ((kept.decode() - exact).abs() <= 0.5001 * kept.scale[:, None]).all()


@pytest.mark.parametrize(
    "norm, outlier, of_row, of_weight",
    [(norm, 1.0, 60, 35), (norm, 30.0, 35, 18), (rms, 1, 60, 35)],
)
def test_gradients_from_codes_have_little_noise(norm, outlier, of_row, of_weight):
    x = torch.randn(512, 768)
    x[:, 5] *= outlier
    forward = on_cpu(norm(x, keeps=True))
    operation = norm_gradient(forward)
    found = compare(operation)
    operation.normalised, operation.z, operation.mean = None, forward.sum.z, forward.mean
    exact = on_cpu(operation)
    assert decibels(found.sum.dresidual, exact.sum.dresidual) > of_row
    assert decibels(found.dweight, exact.dweight) > of_weight
    assert found.dbias is None or torch.equal(found.dbias, exact.dbias)


@BOTH
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits, error", [(8, False), (4, True)])
def test_what_is_added_and_what_is_rounded(norm, rows, bits, error):
    update, residual = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    operation = norm(residual, update, rounds=True, dropout=0.3, bits=bits, error=error)
    found = compare(operation)
    assert torch.equal(found.sum.z, residual + random.dropout(update, 0.3, KEY, 2))
    assert_holds(found.rounded, found.rounded.encode(found.out))
    torch.testing.assert_close(found.unrounded(backends.run), found.out, atol=1e-5, rtol=1e-5)


def test_a_sum_without_norm():
    found = compare(norm(torch.randn(7, COLUMNS), torch.randn(7, COLUMNS), kind=None))
    assert found.out is None and torch.equal(found.sum.z, found.sum.residual + found.sum.update)


@BOTH
def test_only_what_is_wanted_is_written(norm):
    whole = norm(torch.randn(7, COLUMNS), rounds=True)
    wanted = on_cpu(whole).rounded.codes
    whole.sum.z = whole.out = whole.rounded.clipped = None
    assert torch.equal(compare(whole).rounded.codes, wanted)


@pytest.mark.parametrize("kind", [None, "layer", "rms"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rows", [7, 341])
def test_gradients_with_an_update(kind, rounds, rows):
    given = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    forward = on_cpu(norm(*given, kind=kind, dropout=0.3))
    found = compare(norm_gradient(forward, rounds=rounds)).sum
    dupdate = random.dropout(found.dresidual if kind else found.dz, 0.3, KEY, 2)
    torch.testing.assert_close(found.dupdate_sum, dupdate.sum(0), atol=1e-4, rtol=1e-4)
    if rounds:
        assert_holds(found.rounded, found.rounded.encode(dupdate))
    else:
        assert torch.equal(found.dupdate, dupdate)


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 6])
def test_what_is_not_finite_stays_in_its_row(norm, value, row, compared):
    x = torch.randn(7, COLUMNS)
    x[row, 5] = value
    found = compared(norm(x, rounds=True, keeps=True))
    codes, kept = found.rounded.codes, found.normalised
    assert found.out.isnan().any(1).nonzero().flatten().tolist() == [row]
    assert kept.scale.isnan().nonzero().flatten().tolist() == [row] and not kept.codes[row].any()
    assert found.rounded.scale.isnan() and not codes[row].any() and codes.any(1).sum() == 6


def test_rows_without_variance():
    """Epsilon keeps the result finite."""
    found = compare(norm(torch.full((3, COLUMNS), 7.0), keeps=True))
    torch.testing.assert_close(found.out, found.bias.expand(3, -1))
    assert not found.normalised.decode().any()
    found = on_cpu(rms(torch.zeros(3, COLUMNS)))
    assert not found.out.any() and found.rstd.isfinite().all()


@BOTH
def test_epsilon(norm):
    operation = norm(0.01 * torch.randn(7, COLUMNS))
    operation.epsilon = 0.1
    wanted = by_torch(operation, *leaves_of(operation, torch.float32))
    torch.testing.assert_close(on_cpu(operation).out, wanted.detach())


@BOTH
def test_an_empty_batch(norm, compared):
    given = torch.empty(0, COLUMNS), torch.empty(0, COLUMNS)
    forward = compared(norm(*given, rounds=True, dropout=0.1))
    assert forward.rounded.scale.item() == pytest.approx(CLIP / 127)
    found = compared(norm_gradient(forward))
    assert not found.dweight.any() and not found.sum.dupdate_sum.any()
    assert found.dbias is None or not found.dbias.any()


SHAPES = [(1, 48), (7, 48), (41, 48), (341, 48), (7, 1040)]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout, bits", [(0.0, 8), (0.3, 4)])
def test_a_sum_and_its_norm_on_cuda(norm, dtype, dropout, bits):
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_alone_on_cuda(norm, dtype, rows, columns):
    x = torch.randn(rows, columns).to(dtype).float()
    operation = norm(x, rounds=True, error=True, keeps=True)
    compare_cuda(operation, dtype)
    compare_cuda(norm_gradient(on_cpu(operation)), dtype)
    operation.sum.z = operation.out = operation.rounded.error = None
    compare_cuda(operation)


@BOTH
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_of_every_shape_on_cuda(norm, rows, columns, rounds, direct):
    kind = "layer" if norm is not rms else "rms"
    compare_gradients(torch.float32, rows, columns, rounds=rounds, kind=kind, direct=direct)
    compare_cuda(norm_gradient(on_cpu(norm(torch.randn(rows, columns))), direct=direct))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "layer", "rms"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_with_an_update_on_cuda(dtype, kind, rounds, dropout):
    compare_gradients(dtype, 41, 48, rounds=rounds, kind=kind, dropout=dropout)


def compare_gradients(dtype, rows, columns, *, kind="layer", dropout=0.1, **options):
    """Gradients of a norm of a sum, or of the sum alone."""
    z, update = torch.randn(rows, columns).to(dtype).float(), torch.zeros(rows, columns)
    forward = on_cpu(norm(z, update, kind=kind, dropout=dropout))
    whole = norm_gradient(forward, **options)
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
def test_a_gradient_that_is_not_finite(norm, value, compared):
    forward = on_cpu(norm(torch.randn(7, 48), torch.randn(7, 48)))
    operation = norm_gradient(forward, rounds=True, direct=False)
    operation.dout[3, 5] = value
    found = compared(operation)
    assert not found.sum.dresidual[3].isfinite().any()
    assert found.sum.rounded.scale.isnan().nonzero().tolist() == [[3]]


def test_nothing_to_do_on_cuda():
    """Without a norm and without an update, the gradient of z is the residual's."""
    assert not run(ResidualNormGradient(sum=ResidualSumGradient(dz=torch.randn(7, 48)))).outputs


def test_what_kernels_do_not_take_is_refused_on_cuda():
    with refused("takes one dtype"):
        run(norm(torch.randn(7, 48), torch.randn(7, 48).bfloat16(), kind=None))
    with refused("rows of 47 values cannot run on CUDA: the width must be a multiple of 8"):
        run(norm(torch.randn(7, 47)))


@pytest.mark.parametrize("columns", [4104, 6144])
def test_sums_of_48_kib_beside_what_a_kernel_has_of_its_own_on_cuda(columns):
    assert sums_in_shared_memory(columns, 2) == 48 * 1024
    compare_gradients(torch.float32, 3, columns, rounds=False)
