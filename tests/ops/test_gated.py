"""Gated on the CPU and on CUDA: values, codes, gradients of every kind, dropout and NaN."""

import dataclasses
import math

import pytest
import torch

from lsq.native import geometry
from lsq.ops.gated import Gated, GatedGradient
from lsq.ops.nonlinearity import Activation
from lsq.ops.sums import SummedGradient
from lsq.program.values import Rows, dropped
from tests.ops.compare import (
    by_row,
    compare,
    dropout_of,
    empty,
    gradient_to_round,
    on_cpu,
    refused,
    rounded,
    to_round,
)
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_project import PLAIN

KINDS = list(Activation)[1:]


def operands(rows, columns, *, coded=True, **options):
    """Gate and up, of about unit magnitude."""
    if coded:
        return {name: Rows(coded=rounded(rows, columns, **options)) for name in ("gate", "up")}
    return {name: Rows(floats=torch.randn(rows, columns)) for name in ("gate", "up")}


def gated(rows, columns=48, kind=Activation.silu, dropout=0.0, *, coded=True, error=False):
    """What a training step computes."""
    to = to_round(rows, columns, 0.7, error=error)
    end = {"rounded": to} if coded else {"out": empty(rows, columns)}
    both = operands(rows, columns, coded=coded)
    return Gated(**both, activation=kind, dropout=dropout_of(dropout), **end)


def gated_by_row(*arguments, **options):
    """The same with a scale for each row; the second row is zero."""
    made = gated(*arguments, **options)
    made.up.coded.codes[1:2] = 0
    return dataclasses.replace(made, rounded=by_row(made.rounded))


def gated_gradient(
    rows,
    columns=48,
    kind=Activation.silu,
    dropout=0.0,
    *,
    coded=True,
    to_codes=True,
    learned_step=False,
):
    """Its gradient, with all that can be wanted of both sides."""

    def side():
        to, floats = gradient_to_round(rows, columns), empty(rows, columns)
        end = {"rounded": to} if to_codes else {"floats": floats}
        return SummedGradient(**end, sum=empty(columns), clip=empty(1) if coded else None)

    options = {"error": learned_step, "bits": 8 - learned_step} if coded else {}
    return GatedGradient(
        gradient=torch.randn(rows, columns),
        **operands(rows, columns, **options, coded=coded),
        activation=kind,
        dropout=dropout_of(dropout),
        dgate=side(),
        dup=side(),
    )


def values_of(rows):
    return rows.floats if rows.coded is None else rows.coded.codes.float() * rows.coded.scale


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("rows, columns", [(0, 16), (1, 16), (7, 48), (341, 88), (3, 4104)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_codes(kind, rows, columns, dropout, compared):
    found = compared(gated(rows, columns, kind, dropout, error=rows == 7), exact=True)
    assert rows < 7 or found.rounded.clipped.any()
    found = compared(gated_by_row(rows, columns, kind, dropout), exact=True).rounded
    assert rows or found.seen == 0.25
    each = zip(found.codes, found.scale, strict=True)
    assert all(max(row.abs()) == 127 for row, scale in each if scale)
    assert not found.scale[1:2].any() and not found.codes[1:2].any()


def test_rows_are_rounded_to_the_nearest_of_their_own_codes():
    operation = gated_by_row(41)
    operation.gate.coded.codes[7] = 0  # whose activation is 0, too
    found = compare(operation)
    y = PLAIN[Activation.silu](values_of(found.gate)) * values_of(found.up)
    step = y.abs().amax(dim=1) / 127
    assert ((found.rounded.codes * step[:, None] - y).abs() <= 0.50001 * step[:, None] + 1e-7).all()
    torch.testing.assert_close(found.rounded.scale, step)
    assert found.rounded.seen.item() == pytest.approx(max(0.25, y.abs().max().item()))


@every_kind
@pytest.mark.parametrize("rows, columns", [(0, 5), (1, 1), (41, 33)])
def test_floats(kind, rows, columns):
    found = compare(gated(rows, columns, kind, 0.2, coded=False))
    y = dropped(PLAIN[kind](found.gate.floats) * found.up.floats, dropout_of(0.2))
    torch.testing.assert_close(found.out, y, atol=2e-6, rtol=1e-5)


@every_kind
@pytest.mark.parametrize("coded, to_codes", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    "rows, columns, dropout",
    [(0, 16, 0.0), (1, 16, 0.0), (41, 48, 0.3), (341, 88, 0), (7, 1040, 0.1)],
)
def test_gradients(kind, coded, to_codes, rows, columns, dropout, compared):
    options = {"coded": coded, "to_codes": to_codes, "learned_step": rows == 41}
    compared(gated_gradient(rows, columns, kind, dropout, **options), exact=to_codes)


@every_kind
@pytest.mark.parametrize("coded", [True, False])
def test_gradients_are_autograds(kind, coded):
    columns = 48 if coded else 33
    found = on_cpu(gated_gradient(41, columns, kind, 0.2, coded=coded, to_codes=False))
    leaves = [values_of(rows).double().requires_grad_() for rows in (found.gate, found.up)]
    kept = found.dropout.apply(torch.ones(found.gradient.shape)).double()
    result = PLAIN[kind](leaves[0]) * leaves[1] * kept
    exact = torch.autograd.grad(result, leaves, found.gradient.double())
    ends = ((found.gate, found.dgate), (found.up, found.dup))
    for (rows, end), expected in zip(ends, exact, strict=True):
        if coded:
            sign = rows.coded.codes.double().sign()
            inside, _ = rows.coded.straight_through(torch.ones(expected.shape))
            outside = (expected * sign * (1 - inside)).sum()[None]
            torch.testing.assert_close(end.clip.double(), outside, rtol=1e-4, atol=1e-4)
            expected = expected * inside
        torch.testing.assert_close(end.floats.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(end.sum.double(), expected.sum(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("poisoned", ["gate", "up"])
def test_nan_poisons_the_result(poisoned):
    operation = gated(41)
    getattr(operation, poisoned).coded.scale[0] = math.nan
    for rounding in (operation.rounded, by_row(operation.rounded)):
        found = compare(dataclasses.replace(operation, rounded=rounding)).rounded
        assert found.scale.isnan().all() and not found.codes.any()


def test_one_of_two_rounded_is_refused():
    both = operands(7, 16)["gate"], operands(7, 16, coded=False)["up"]
    with refused("one of gate and up is codes and the other floats"):
        Gated(gate=both[0], up=both[1], activation=Activation.silu, out=empty(7, 16))


@pytest.mark.parametrize(
    "rows, dropout, learned_step", [(41, 0.3, True), (41, 0.3, False), (341, 0.0, False)]
)
def test_a_gradient_in_bfloat16_counts_as_its_values(rows, dropout, learned_step):
    wide = gated_gradient(rows, dropout=dropout, learned_step=learned_step)
    narrow = dataclasses.replace(wide, gradient=wide.gradient.bfloat16())
    expected = on_cpu(dataclasses.replace(wide, gradient=narrow.gradient.float()))
    assert all(map(torch.equal, compare(narrow).outputs, expected.outputs))


def test_blocks_take_several_rows_on_cuda(monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))
    compare_cuda(gated_by_row(9, 2064), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Activation.silu, Activation.gelu_tanh])
@pytest.mark.parametrize("rows", [0, 41])
def test_floats_on_cuda(dtype, kind, rows):
    compare_cuda(gated(rows, 48, kind, 0.2, coded=False), dtype)
    compare_cuda(gated_gradient(rows, 48, kind, 0.2, coded=False, to_codes=False), dtype)
    compare_cuda(gated_gradient(rows, 48, kind, 0.2, to_codes=False), dtype)


def test_widths_that_no_kernel_takes_are_refused_on_cuda():
    with refused("width of a gate is 33.*multiple of 8"):
        compare_cuda(gated(7, 33, coded=False))
