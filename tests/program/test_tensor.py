"""Virtual tensors: sizes, text, identity."""

import pytest
import torch

from lsq.program.tensor import VirtualTensor


@pytest.mark.parametrize(
    "shape, dtype, size",
    [
        ((21, 48), torch.float32, 4032),
        ((21, 48), torch.int8, 1008),
        ((5,), torch.int64, 40),
        ((0, 7), torch.float32, 0),
    ],
)
def test_bytes(shape, dtype, size):
    assert VirtualTensor(name="x", shape=shape, dtype=dtype).size == size


def test_text():
    assert (
        repr(VirtualTensor(name="codes", shape=(21, 48), dtype=torch.int8)) == "codes int8[21, 48]"
    )
    assert repr(VirtualTensor(name="scale", shape=(1,))) == "scale float32[1]"


def test_tensors_equal_only_themselves():
    a, b = (VirtualTensor(name="x", shape=(1,)) for _ in range(2))
    assert a != b and len({a, b}) == 2
