"""ResidualNorm as RMSNorm, against torch's rms_norm in float64, with every part left out in
turn."""

import math

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers.programs import Mode
from lsq.ops.project import Project
from lsq.ops.residual_norm import ResidualNorm, ResidualNormGradient, ResidualSum
from lsq.program.parameters import Kind
from lsq.program.values import Rows
from lsq.quant import random
from lsq.run.backends import backend, run
from lsq.run.executor import Execution
from tests.ops.compare import (
    KEY,
    ROWS,
    assert_accurate,
    assert_holds,
    compare,
    empty,
    on_cpu,
    to_round,
)
from tests.ops.test_residual_norm import (
    CLIP,
    COLUMNS,
    decibels,
    kept_by,
    sum_gradient,
    sum_of,
    to_keep,
)


def rms(
    residual, update=None, *, rounds=False, keeps=False, dropout=0.0, **rounding
) -> ResidualNorm:
    """Of `residual` [M, H], with everything written that can be; rounding: see `to_round`."""
    rows, columns = residual.shape
    return ResidualNorm(
        sum=sum_of(residual, update, dropout),
        weight=1 + 0.2 * torch.randn(columns),
        rstd=empty(rows),
        out=empty(rows, columns),
        rounded=to_round(rows, columns, CLIP, **rounding) if rounds else None,
        normalised=to_keep(rows, columns) if keeps else None,
    )


def rms_gradient(forward: ResidualNorm, **options) -> ResidualNormGradient:
    """Of a norm that was computed, for random gradients of its results; options: see
    `sum_gradient`."""
    rows, columns = forward.sum.residual.shape
    return ResidualNormGradient(
        dout=torch.randn(rows, columns),
        **kept_by(forward),
        rstd=forward.rstd,
        weight=forward.weight,
        dweight=empty(columns),
        sum=sum_gradient(forward.sum, **options),
    )


def by_torch(x, weight, epsilon=1e-5):
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight, epsilon)


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 3), (41, 48), (341, 1040)])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_the_norm_is_as_accurate_as_torchs(rows, columns, offset):
    x = offset + torch.randn(rows, columns)
    operation = rms(x)
    found = on_cpu(operation)
    assert torch.equal(found.sum.z, x)
    exact = by_torch(x.double(), operation.weight.double())
    assert_accurate(found.out, exact, by_torch(x, operation.weight))
    rstd = (x.double().square().mean(1) + 1e-5).rsqrt().float()
    torch.testing.assert_close(found.rstd, rstd, atol=1e-6, rtol=1e-5)


def test_gradients_from_codes_have_little_noise():
    forward = on_cpu(rms(torch.randn(512, 768), keeps=True))
    operation = rms_gradient(forward)
    found = compare(operation)
    operation.normalised, operation.z = None, forward.sum.z
    exact = on_cpu(operation)
    assert (
        decibels(found.sum.dresidual, exact.sum.dresidual) > 60
        and decibels(found.dweight, exact.dweight) > 35
    )


@pytest.mark.parametrize("rows, columns", [(1, 5), (7, 3), (41, 48), (341, 1040)])
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_are_as_accurate_as_torchs(rows, columns, direct):
    forward = on_cpu(rms(torch.randn(rows, columns)))
    found = compare(rms_gradient(forward, direct=direct))

    def by_autograd(dtype):
        x, weight = (
            one.to(dtype).requires_grad_() for one in (forward.sum.residual, forward.weight)
        )
        total = (by_torch(x, weight) * found.dout.to(dtype)).sum()
        if direct:
            total = total + (x * found.sum.dz.to(dtype)).sum()
        return torch.autograd.grad(total, (x, weight))

    exact, single = by_autograd(torch.float64), by_autograd(torch.float32)
    for one, *values in zip((found.sum.dresidual, found.dweight), exact, single, strict=True):
        assert_accurate(one, *values)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits, error", [(8, False), (4, True)])
def test_what_is_added_and_what_is_rounded(rows, bits, error):
    update, residual = torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS)
    operation = rms(residual, update, rounds=True, dropout=0.3, bits=bits, error=error)
    found = compare(operation)
    assert torch.equal(found.sum.z, residual + random.dropout(update, 0.3, KEY, 2))
    assert_holds(found.rounded, found.rounded.encode(found.out))
    torch.testing.assert_close(found.unrounded(run), found.out, atol=1e-5, rtol=1e-5)


def test_only_what_is_wanted_is_written():
    whole = rms(torch.randn(7, COLUMNS), rounds=True)
    wanted = on_cpu(whole).rounded.codes
    whole.sum.z = whole.out = whole.rounded.clipped = None
    assert torch.equal(compare(whole).rounded.codes, wanted)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rows", [7, 341])
def test_gradients_with_an_update(rounds, rows):
    forward = on_cpu(rms(torch.randn(rows, COLUMNS), torch.randn(rows, COLUMNS), dropout=0.3))
    found = compare(rms_gradient(forward, rounds=rounds)).sum
    dupdate = random.dropout(found.dresidual, 0.3, KEY, 2)
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
    exact = by_torch(z, leaves["weight"]), by_torch(z, leaves["other"])
    given = {name: tensor.requires_grad_() for name, tensor in drawn.items()}
    results = Execution(program, mode.backend)({**given, "random_key": KEY})
    upstream = [torch.randn(size) for _ in exact]
    found = torch.autograd.grad(results, list(given.values()), upstream)
    wanted = torch.autograd.grad(exact, list(leaves.values()), [one.double() for one in upstream])
    for one, other in zip((*results, *found), (*exact, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row", [0, 3, 6])
def test_nan_stays_in_its_row_and_poisons_the_scale(row):
    x = torch.randn(7, COLUMNS)
    x[row, 5] = math.nan
    found = compare(rms(x, rounds=True))
    assert found.out.isnan().any(1).nonzero().flatten().tolist() == [row]
    codes = found.rounded.codes
    assert found.rounded.scale.isnan() and not codes[row].any() and codes.any(1).sum() == 6


def test_a_row_of_zeros():
    """Epsilon keeps the result finite."""
    found = on_cpu(rms(torch.zeros(3, COLUMNS)))
    assert not found.out.any() and found.rstd.isfinite().all()


def test_epsilon():
    operation = rms(0.01 * torch.randn(7, COLUMNS))
    operation.epsilon = 0.1
    torch.testing.assert_close(
        on_cpu(operation).out, by_torch(operation.sum.residual, operation.weight, 0.1)
    )


def test_an_empty_batch():
    forward = compare(
        rms(torch.empty(0, COLUMNS), torch.empty(0, COLUMNS), rounds=True, dropout=0.1)
    )
    assert forward.rounded.scale.item() == pytest.approx(CLIP / 127)
    found = compare(rms_gradient(forward))
    assert not found.dweight.any() and not found.sum.dupdate_sum.any()
