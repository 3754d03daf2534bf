"""ResidualNorm against torch's layer_norm and rms_norm in float64, every part left out in turn."""

import functools
import math

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers.programs import Mode
from lsq.ops.project import Project
from lsq.ops.residual_norm import (
    NormalisedRows,
    ResidualNorm,
    ResidualNormGradient,
    ResidualSum,
    ResidualSumGradient,
)
from lsq.program.tensor import Kind
from lsq.program.values import Rows
from lsq.quant import NORMALISED, random
from lsq.run.backends import backend, run
from lsq.run.executor import Execution
from tests.ops.compare import (
    KEY,
    ROWS,
    assert_accurate,
    assert_holds,
    compare,
    dropout_of,
    empty,
    gradient_to_round,
    on_cpu,
    to_round,
)

SHAPE = (7, 48)


def sum_of(residual, update=None, dropout=0.0) -> ResidualSum:
    """Of `residual` [M, H] and what is added to it, with z."""
    return ResidualSum(
        residual=residual, update=update, dropout=dropout_of(dropout), z=empty(*residual.shape)
    )


def sum_gradient(
    forward: ResidualSum, *, normed=True, rounds=False, direct=True
) -> ResidualSumGradient:
    """Of a sum that was computed; `direct`: z has a gradient of its own, which it must where there
    is no norm."""
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


def test_without_an_update_z_is_the_residual():
    made = sum_of(torch.randn(SHAPE))
    assert made.compute() is made.kept is made.residual


def test_what_is_added_is_dropped_first():
    made = sum_of(torch.randn(SHAPE), torch.randn(SHAPE), 0.3)
    assert torch.equal(made.compute(), made.residual + random.dropout(made.update, 0.3, KEY, 2))
    assert made.kept is made.z


@pytest.mark.parametrize("normed, direct", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_autograd(normed, direct):
    residual, update = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))
    forward = sum_of(residual, update, 0.3)
    down = sum_gradient(forward, normed=normed, direct=direct)
    through = torch.randn(SHAPE) if normed else None
    upstream = sum(one for one in (through, down.dz) if one is not None)
    wanted = torch.autograd.grad(forward.compute(), (residual, update), upstream)
    results = down.compute(through)
    assert torch.equal(results["dresidual"], wanted[0])
    assert torch.equal(results["dupdate"], wanted[1]) and results["rounded"] is None
    assert torch.equal(results["dupdate_sum"], wanted[1].sum(0))


def test_a_rounded_gradient_is_that_of_the_update():
    down = sum_gradient(sum_of(torch.randn(SHAPE), torch.randn(SHAPE), 0.3), rounds=True)
    results = down.compute(torch.randn(SHAPE))
    wanted = down.rounded.encode(results["dupdate"])
    assert all(torch.equal(results["rounded"][name], wanted[name]) for name in ("codes", "scale"))


def test_nothing_goes_where_nothing_was_added():
    down = sum_gradient(sum_of(torch.randn(SHAPE)))
    through = torch.randn(SHAPE)
    results = down.compute(through)
    assert list(results) == ["dresidual"] and not down.updated
    assert torch.equal(results["dresidual"], through + down.dz)


COLUMNS, CLIP = 48, 1.6


def affine(columns=COLUMNS):
    """Weight and bias of a norm."""
    return 1 + 0.2 * torch.randn(columns), 0.2 * torch.randn(columns)


def to_keep(rows: int, columns: int) -> NormalisedRows:
    """What a norm is to keep of its rows."""
    codes = empty(rows, columns, dtype=torch.int8)
    return NormalisedRows(format=NORMALISED, codes=codes, scale=empty(rows))


def norm(
    residual, update=None, *, kind="layer", rounds=False, keeps=False, dropout=0.0, **rounding
) -> ResidualNorm:
    """LayerNorm, RMSNorm ("rms") or the sum alone (None) of `residual` [M, H], with everything
    written that can be; rounding: see `to_round`."""
    rows, columns = residual.shape
    made = ResidualNorm(sum=sum_of(residual, update, dropout))
    if kind is not None:
        made.weight, bias = affine(columns)
        if kind == "layer":
            made.bias, made.mean = bias, empty(rows)
        made.rstd, made.out = empty(rows), empty(rows, columns)
        made.rounded = to_round(rows, columns, CLIP, **rounding) if rounds else None
        made.normalised = to_keep(rows, columns) if keeps else None
    return made


def norm_gradient(forward: ResidualNorm, **options) -> ResidualNormGradient:
    """Of a norm that was computed, for random gradients of its results; options: see
    `sum_gradient`."""
    rows, columns = forward.sum.residual.shape
    normed = forward.weight is not None
    return ResidualNormGradient(
        dout=torch.randn(rows, columns) if normed else None,
        **(kept_by(forward) if normed else {}),
        rstd=forward.rstd,
        centred=forward.mean is not None,
        weight=forward.weight,
        dweight=empty(columns) if normed else None,
        dbias=None if forward.bias is None else empty(columns),
        sum=sum_gradient(forward.sum, normed=normed, **options),
    )


def kept_by(forward: ResidualNorm) -> dict:
    """What the backward pass reads of a norm that was computed."""
    if forward.normalised:
        return {"normalised": forward.normalised}
    return {"z": forward.sum.z, "mean": forward.mean}


rms = functools.partial(norm, kind="rms")
BOTH = pytest.mark.parametrize("norm", [norm, rms], ids=["layer", "rms"])


def rms_by_torch(x, weight, epsilon=1e-5):
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight, epsilon)


def by_torch(operation: ResidualNorm, x, weight, bias=None):
    """The norm of the same kind, in any dtype."""
    if operation.bias is None:
        return rms_by_torch(x, weight, operation.epsilon)
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
        exact, single = (
            by_torch(operation, *leaves_of(operation, dtype)).detach()
            for dtype in (torch.float64, torch.float32)
        )
        assert_accurate(found.out, exact, single)
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

    exact, single = by_autograd(torch.float64), by_autograd(torch.float32)
    results = (found.sum.dresidual, found.dweight, found.dbias)[: len(exact)]
    for one, *values in zip(results, exact, single, strict=True):
        assert_accurate(one, *values)


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible_in_kept_codes(value):
    x = torch.randn(7, COLUMNS)
    x[3, 5] = value
    found = compare(norm(x, keeps=True)).normalised
    assert found.scale.isnan().nonzero().flatten().tolist() == [3] and not found.codes[3].any()
    constant = compare(norm(torch.full((2, COLUMNS), 7.0), keeps=True)).normalised
    assert not constant.decode().any()


@BOTH
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits, error", [(8, False), (4, True)])
def test_what_is_added_and_what_is_rounded(norm, rows, bits, error):
    update, residual = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    operation = norm(residual, update, rounds=True, dropout=0.3, bits=bits, error=error)
    found = compare(operation)
    assert torch.equal(found.sum.z, residual + random.dropout(update, 0.3, KEY, 2))
    assert_holds(found.rounded, found.rounded.encode(found.out))
    torch.testing.assert_close(found.unrounded(run), found.out, atol=1e-5, rtol=1e-5)


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
    forward = on_cpu(
        norm(torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS), kind=kind, dropout=0.3)
    )
    found = compare(norm_gradient(forward, rounds=rounds)).sum
    dupdate = random.dropout(found.dresidual if kind else found.dz, 0.3, KEY, 2)
    torch.testing.assert_close(found.dupdate_sum, dupdate.sum(0), atol=1e-4, rtol=1e-4)
    if rounds:
        assert_holds(found.rounded, found.rounded.encode(dupdate))
    else:
        assert torch.equal(found.dupdate, dupdate)


def test_programs_differentiate_it():
    """A norm of a sum, whose float and rounded results are both read, as is the sum."""
    mode = Mode(training=True, backward=True, backend=backend("cpu"))
    b = mode.builder("norm", QuantConfig(mode="float"))
    size = (16, 16)
    x = b.input("x", size)
    project = b.add(
        Project(x=Rows(floats=x), weight=b.weight("projection", size), out=b.tensor("update", size))
    )
    first = b.add(
        ResidualNorm(
            sum=ResidualSum(residual=x, update=project.out, z=b.like("z", x)),
            rstd=b.tensor("rstd", size[:1]),
            weight=b.parameter("weight", (16,), Kind.NORM_WEIGHT),
            out=b.like("first", x),
        )
    )
    second = b.add(
        ResidualNorm(
            sum=ResidualSum(residual=first.sum.z),
            rstd=b.tensor("rstd", size[:1]),
            out=b.like("second", x),
            weight=b.parameter("other", (16,), Kind.NORM_WEIGHT),
        )
    )
    b.output(first.out)
    b.output(second.out)
    program = b.build()
    drawn = {"x": torch.randn(size), "projection": torch.randn(size)}
    drawn |= {name: torch.randn(16) for name in ("weight", "other")}
    leaves = {name: tensor.double().requires_grad_() for name, tensor in drawn.items()}
    z = leaves["x"] + leaves["x"] @ leaves["projection"].t()
    exact = rms_by_torch(z, leaves["weight"]), rms_by_torch(z, leaves["other"])
    given = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    results = Execution(program, mode.backend)({**given, "random_key": KEY})
    upstream = [torch.randn(size) for _ in exact]
    found = torch.autograd.grad(results, list(given.values()), upstream)
    wanted = torch.autograd.grad(exact, list(leaves.values()), [one.double() for one in upstream])
    for one, other in zip((*results, *found), (*exact, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("row", [0, 3, 6])
def test_nan_stays_in_its_row_and_poisons_the_scale(norm, row):
    x = torch.randn(7, COLUMNS)
    x[row, 5] = math.nan
    found = compare(norm(x, rounds=True))
    assert found.out.isnan().any(1).nonzero().flatten().tolist() == [row]
    codes = found.rounded.codes
    assert found.rounded.scale.isnan() and not codes[row].any() and codes.any(1).sum() == 6


def test_a_constant_row():
    """Its variance is 0: epsilon keeps the result finite."""
    found = on_cpu(norm(torch.full((3, COLUMNS), 7.0)))
    torch.testing.assert_close(found.out, found.bias.expand(3, -1))


def test_a_row_of_zeros():
    """Epsilon keeps the result finite."""
    found = on_cpu(rms(torch.zeros(3, COLUMNS)))
    assert not found.out.any() and found.rstd.isfinite().all()


@BOTH
def test_epsilon(norm):
    operation = norm(0.01 * torch.randn(7, COLUMNS))
    operation.epsilon = 0.1
    wanted = by_torch(operation, *leaves_of(operation, torch.float32))
    torch.testing.assert_close(on_cpu(operation).out, wanted.detach())


@BOTH
def test_an_empty_batch(norm):
    forward = compare(
        norm(torch.empty(0, COLUMNS), torch.empty(0, COLUMNS), rounds=True, dropout=0.1)
    )
    assert forward.rounded.scale.item() == pytest.approx(CLIP / 127)
    found = compare(norm_gradient(forward))
    assert not found.dweight.any() and not found.sum.dupdate_sum.any()
    assert found.dbias is None or not found.dbias.any()
