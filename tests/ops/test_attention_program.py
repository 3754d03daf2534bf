"""What attention asks of a program's builder for its gradients."""

import pytest
import torch

from lsq.program.values import RoundedGradient
from tests.ops.attentions import OTHERS, attention
from tests.ops.compare import empty
from tests.ops.compare import gradient_to_round as to_round_by_row


class Asked:
    """A builder that hands out a new tensor for whatever is asked for."""

    def __init__(self):
        self.added = []

    def add(self, operation):
        self.added.append(operation)
        return operation

    def gradient_sum(self, *tensors):
        return empty(*next(one for one in tensors if one is not None).shape)

    def product_gradient(self, tensor):
        rounded = RoundedGradient(**vars(to_round_by_row(*tensor.shape)))
        return (empty(*tensor.shape), None) if tensor.dtype == torch.float32 else (None, rounded)

    def bias_gradient(self, tensor):
        return empty(tensor.shape[1])

    def parameter_gradient(self, parameter):
        return None if parameter is None else empty(*parameter.shape)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("others", [None, OTHERS])
def test_the_gradient_in_a_program(coded, others):
    builder, forward = Asked(), attention(others=others, coded=coded)
    forward.gradient(builder)
    (backward,) = builder.added
    assert backward.heads is forward.heads and backward.log_sum is forward.log_sum
    assert (backward.dkv is not None) == (others is not None)
    for one in filter(None, (backward.dq, backward.dkv)):
        assert (one.rounded is not None) == coded == (one.floats is None) == (one.clip is not None)
        assert one.sum is not None
