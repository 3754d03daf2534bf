"""Gated on CUDA: kernels in the emulator, or on a GPU."""

import pytest

from lsq.native import geometry
from lsq.ops.nonlinearity import Activation
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_gated import KINDS, gated, gated_by_row, gated_gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns, dropout", [(1, 16, 0.0), (41, 48, 0.3), (341, 88, 0.0)])
def test_codes_are_exact(kind, rows, columns, dropout):
    compare_cuda(gated(rows, columns, kind, dropout, error=rows == 41), exact=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, columns, dropout", [(0, 16, 0.0), (1, 16, 0.0), (41, 48, 0.3), (3, 4104, 0.0)]
)
def test_codes_by_row_are_exact(kind, rows, columns, dropout):
    compare_cuda(gated_by_row(rows, columns, kind, dropout), exact=True)


def test_blocks_take_several_rows(monkeypatch):
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(2, turns)))
    compare_cuda(gated_by_row(9, 2064), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Activation.silu, Activation.gelu_tanh])
@pytest.mark.parametrize("rows", [0, 41])
def test_floats(dtype, kind, rows):
    compare_cuda(gated(rows, 48, kind, 0.2, coded=False), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, columns, dropout, learned_step",
    [(0, 16, 0.0, False), (41, 48, 0.3, True), (7, 1040, 0.1, False)],
)
def test_rounded_gradients_are_exact(kind, rows, columns, dropout, learned_step):
    compare_cuda(
        gated_gradient(rows, columns, kind, dropout, learned_step=learned_step), exact=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("kind", [Activation.silu, Activation.gelu])
def test_float_gradients(dtype, coded, kind):
    compare_cuda(gated_gradient(41, 48, kind, 0.2, coded=coded, to_codes=False), dtype)


def test_widths_that_no_kernel_takes_are_refused():
    with pytest.raises(ValueError, match="width of a gate is 33.*multiple of 8"):
        compare_cuda(gated(7, 33, coded=False))
