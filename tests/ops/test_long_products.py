"""Products of more inner elements than one int32 sum has room for, on the CPU, against float64."""

import pytest
import torch

from lsq.native import tiles
from tests.ops.compare import compare
from tests.ops.long_products import input_gradient, largest_error, project, weight_gradient
from tests.ops.products import multiplied

EXACT = 1e-6
"""What float32 loses: a relative error of the sums and of their scales."""
WAYS = [("plain", 0), *((kernel, 32) for kernel in tiles.INSTRUCTIONS if kernel != "plain")]


@pytest.fixture(params=WAYS, ids=str)
def way(request):
    """How the parts are multiplied."""
    with multiplied(*request.param):
        yield


@pytest.mark.usefixtures("way")
def test_inputs():
    operation, exact = project(rounded=False)
    assert largest_error(compare(operation).out, exact) < EXACT


@pytest.mark.usefixtures("way")
def test_outputs():
    operation, exact = input_gradient(rounded=False)
    found = compare(operation)
    assert largest_error(found.dx, exact) < EXACT
    assert largest_error(found.sum, exact.sum(0)) < EXACT


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("in_out", [False, True])
def test_rows(in_out):
    operation, exact = weight_gradient(in_out=in_out)
    # x is rounded once more, with a scale for each column: at random, without bias.
    assert largest_error(compare(operation).dweight, exact) < 1e-4


def test_codes_of_long_products():
    operation, exact = project(rounded=True)
    scale = 3.0 / operation.rounded.largest
    codes = (exact.clamp(-3.0, 3.0) / scale).round()
    assert (compare(operation).rounded.codes - codes).abs().max() <= 1
    operation, exact = input_gradient(rounded=True)
    found = compare(operation).rounded
    steps = found.scale[:, None].double() / found.weight_scale
    assert ((found.codes.double() * steps - exact).abs() <= 1.001 * steps).all()
    assert torch.isfinite(found.scale).all()
