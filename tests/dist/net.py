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
