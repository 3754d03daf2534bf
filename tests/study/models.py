"""Models and losses whose costs are known."""

import torch
from torch import Tensor, nn
from torch.nn import functional

Sample = tuple[Tensor, Tensor, Tensor]


class Quadratic(nn.Module):
    """x [3, 40] -> x I + w, so that a change of the input or of w is a change of the output."""

    def __init__(self):
        super().__init__()
        chance = torch.Generator().manual_seed(1)
        self.shift = nn.Parameter(torch.randn(3, 40, generator=chance))
        self.idle = nn.Linear(40, 7)
        self.same = nn.Linear(40, 40, bias=False)
        with torch.no_grad():
            self.same.weight.copy_(torch.eye(40))

    def forward(self, x: Tensor) -> Tensor:
        return self.same(x) + self.shift + 0 * self.idle(x).sum()


def quadratic_samples(slope: float) -> list[Sample]:
    """(x, curvature, target); squared gradients are the curvature; with slope 0 they cancel."""
    chance = torch.Generator().manual_seed(2)
    model, x = Quadratic(), torch.randn(3, 40, generator=chance)
    curvature = torch.rand(3, 40, generator=chance) + 0.1
    outputs = x + model.shift.detach()
    return [
        (x, curvature, outputs + sign * curvature.rsqrt()) for sign in (1.0, 1.0 if slope else -1.0)
    ]


def quadratic_loss(model: nn.Module, sample: Sample) -> tuple[Tensor, float]:
    x, curvature, target = sample
    return (curvature.double() * (model(x).double() - target.double()).square()).sum() / 2, 5.0


class Layers(nn.Module):
    """Linear, Conv1D-like (by addmm, its weight [K, N]), PyTorch's attention, and a tied table."""

    def __init__(self, words: int = 11, width: int = 24):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=0.5)
        self.across = nn.Parameter(torch.randn(width, 40) / 4)
        self.back = nn.Linear(40, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        inner = torch.addmm(torch.ones(40, dtype=x.dtype), x.flatten(0, 1), self.across).relu()
        return self.out(x + self.back(inner).view_as(x))


def word_batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(4)
    pair = lambda i: tuple(torch.randint(11, (2, 3, 5 + i), generator=chance))  # noqa: E731
    return [pair(i) for i in range(count)]


def word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    tokens, target = batch
    logits = model(tokens).double()
    total = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return total, float(target.numel())
