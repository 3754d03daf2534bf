import pytest
import torch

from lsq.native.addresses import contiguous_address, tensor_address

CPU = torch.device("cpu")


class Unsaid:
    """What a message would begin with."""

    def __format__(self, spec: str) -> str:
        raise AssertionError("a message is being made")


def test_nothing_is_said_of_a_tensor_that_fits():
    x = torch.zeros(4, 8)
    assert tensor_address(x, CPU, Unsaid()) == contiguous_address(x, CPU, Unsaid()) == x.data_ptr()
    assert tensor_address(x.T, CPU, Unsaid()) == x.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(4, device="meta"),
            "x: a tensor lies on meta, but this list runs on cpu; move it",
        ),
        (torch.zeros(9)[1:], "x: a tensor begins 4 bytes after a multiple of 16; copy it"),
        (torch.zeros(4, 8).T, r"x: a tensor with strides \(1, 8\) is not contiguous"),
    ],
)
def test_what_kernels_cannot_take(tensor, message):
    with pytest.raises(ValueError, match=message):
        contiguous_address(tensor, CPU, "x")
