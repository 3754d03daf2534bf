"""Which gradients a step takes that was prepared for their norm."""

import pytest
import torch

from lsq.optim import Adam
from lsq.run.frames import Slot


def pair():
    """Two optimizers of equal parameters with equal gradients, one of which has other strides than
    its parameter."""
    torch.manual_seed(1)
    gradients = [torch.randn(7), torch.randn(5, 3).t()]
    made = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        made.append(Adam(parameters, lr=0.1))
    return made


def parameters(optimizer):
    return optimizer.param_groups[0]["params"]


def test_a_step_takes_what_was_taken_for_the_norm(monkeypatch):
    optimizer, _ = pair()
    parameters(optimizer)[1].grad = torch.randn(3, 5)
    count, original = [], Slot.put
    monkeypatch.setattr(
        Slot, "put", lambda slot, tensor: (count.append(tensor), original(slot, tensor))
    )
    for number in range(1, 3):
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert len(count) == 2 * number


def scale(parameter):
    parameter.grad.mul_(-2)


def replace(parameter):
    parameter.grad = -2 * parameter.grad


def move(parameter):
    parameter.grad.data = -2 * parameter.grad


@pytest.mark.parametrize("change", [scale, replace, move])
def test_gradients_that_change_after_their_norm_count_as_they_are(change):
    changed, other = pair()
    changed.clip_grad_norm(0.0)
    for optimizer in (changed, other):
        for parameter in parameters(optimizer):
            change(parameter)
        optimizer.step()
    assert all(map(torch.equal, parameters(changed), parameters(other)))
    assert all(changed.state[one]["step"] == 1 for one in parameters(changed))
