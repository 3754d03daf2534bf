"""ResidualSum and its gradient by themselves, in plain PyTorch; norms test what loops and kernels
make of them."""

import pytest
import torch

from lsq.ops.residual_sum import ResidualSum, ResidualSumGradient
from lsq.quant import random
from tests.ops.compare import KEY, dropout_of, empty, gradient_to_round

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
    dresidual, dupdate, codes, scale, dupdate_sum = down.compute(through)
    assert torch.equal(dresidual, wanted[0]) and torch.equal(dupdate, wanted[1])
    assert torch.equal(dupdate_sum, wanted[1].sum(0)) and codes is scale is None


def test_a_rounded_gradient_is_that_of_the_update():
    down = sum_gradient(sum_of(torch.randn(SHAPE), torch.randn(SHAPE), 0.3), rounds=True)
    _, dupdate, codes, scale, _ = down.compute(torch.randn(SHAPE))
    assert all(map(torch.equal, (codes, scale), down.rounded.encode(dupdate)))


def test_nothing_goes_where_nothing_was_added():
    down = sum_gradient(sum_of(torch.randn(SHAPE)))
    through = torch.randn(SHAPE)
    dresidual, *others = down.compute(through)
    assert torch.equal(dresidual, through + down.dz) and others == [None] * 4 and not down.updated
