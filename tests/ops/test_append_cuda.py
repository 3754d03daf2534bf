"""Append on CUDA: kernels in the emulator, or on a GPU."""

import pytest

from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_append import append_of

SIZES = [(0, 0, 16), (1, 0, 16), (3, 7, 33), (7, 41, 48)]


@pytest.mark.parametrize("batch, past, width", SIZES)
def test_codes(batch, past, width):
    compare_cuda(append_of(batch, past, width, codes=True), exact=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, past, width", SIZES)
def test_floats(batch, past, width, dtype):
    compare_cuda(append_of(batch, past, width, codes=False), dtype)


def test_activations_of_two_dtypes_are_refused():
    operation = append_of(1, 1, 16, codes=False)
    operation.now_floats = operation.now_floats.bfloat16()
    with pytest.raises(ValueError, match="takes one dtype"):
        operation.cuda()
