"""What the tests of planned memory ask of tensors that are lent."""

import torch

from tests.layers.toy import batch


def inside(memory, tensor: torch.Tensor) -> bool:
    base = memory.arena.tensor(0, (1,), torch.uint8).data_ptr()
    return base <= tensor.data_ptr() < base + memory.arena.size


def both(planned, naive, step) -> tuple[list, list]:
    """What `step(model)` returns for each, from the same random numbers."""
    results = []
    for model in (planned, naive):
        torch.manual_seed(7)
        results.append(list(step(model)))
    return tuple(results)


def equal(found, expected) -> bool:
    return all((a is b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def gradients(model) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def backward(model, seed: int = 0):
    model(*batch(3, 7, 9, seed=seed)).backward()
    return gradients(model)
