"""Products of more inner elements than one int32 sum has room for, on CUDA: the CPU's results."""

import pytest

from tests.ops.cuda import compare_cuda
from tests.ops.long_products import input_gradient, largest_error, project, weight_gradient


def test_inputs():
    compare_cuda(project(rounded=True)[0], exact=True)
    operation, exact = project(rounded=False)
    assert largest_error(compare_cuda(operation).out, exact) < 1e-6


def test_outputs():
    compare_cuda(input_gradient(rounded=True)[0], exact=True)
    operation, exact = input_gradient(rounded=False)
    assert largest_error(compare_cuda(operation).dx, exact) < 1e-6


@pytest.mark.parametrize("in_out", [False, True])
def test_rows(in_out):
    operation, exact = weight_gradient(in_out=in_out)
    assert largest_error(compare_cuda(operation).dweight, exact) < 1e-4
