"""A small model with its batches and gradients, for tests of hooks."""

import torch
from torch import distributed, nn

from lsq.dist import GradientConfig


def config(mode: str, **options) -> GradientConfig:
    return GradientConfig(mode=mode, node_size=2 if mode.endswith("_hier") else None, **options)


class Net(nn.Module):
    """Layers of odd sizes; the second half of the batch's workers does without `spare`."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = nn.Linear(37, 53), nn.Linear(53, 7), nn.Linear(53, 7)
        self.to(dtype)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) + (self.spare(hidden) if use_spare else 0)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 37, generator=torch.Generator().manual_seed(1000 * rank + step))


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def exact_mean(net: nn.Module, inputs: list[torch.Tensor], **options) -> torch.Tensor:
    """The mean over workers of the gradients of a loss that is summed over `inputs`."""
    loss = sum(net(x, **options).float().square().sum() for x in inputs)
    found = torch.autograd.grad(
        loss, list(net.parameters()), allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([gradient.flatten() for gradient in found]).float()
    distributed.all_reduce(flat)
    return flat / distributed.get_world_size()


class Uneven(nn.Module):
    """Tensors of 1 and 15 values whose gradients are a millionth of those of the 16 and 9,000
    values around them."""

    SIZES = {"first": 3000, "one": 1, "fifteen": 15, "sixteen": 16, "last": 6000}

    def __init__(self):
        super().__init__()
        for name, size in self.SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    @classmethod
    def parts(cls, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.split(list(cls.SIZES.values()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its gradients are pieces of `x` [9032], the small ones times 1e-6."""
        own = [getattr(self, name) for name in self.SIZES]
        parts = zip(own, self.parts(x), strict=True)
        return sum((one * part).sum() * (1e-6 if one.numel() < 16 else 1) for one, part in parts)


def pieces(seed: int) -> torch.Tensor:
    return torch.randn(9032, generator=torch.Generator().manual_seed(seed))
