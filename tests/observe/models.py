"""A small language model with gated feed-forward blocks, as nn.Linear, and text for it."""

import torch
from torch import nn
from torch.nn import functional

import lsq
from tests.constants import quant_with

WIDTH, FEED_FORWARD, WORDS = 64, 128, 96
OUTLIERS = 3


class GatedBlock(nn.Module):
    """Llama's feed-forward block; `spike` enlarges a few inner channels, not the results."""

    def __init__(self, spike: float = 1.0):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.up = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight[:OUTLIERS] *= spike
            self.down.weight[:, :OUTLIERS] /= spike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class GatedModel(nn.Module):
    """Tokens int64 [B, T] -> logits [B, T, WORDS]. `spikes`: of each block."""

    def __init__(self, spikes: tuple[float, ...] = (1.0, 1.0)):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(map(GatedBlock, spikes))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gated_model(*spikes: float, seed: int = 1) -> GatedModel:
    torch.manual_seed(seed)
    return GatedModel(spikes or (1.0, 1.0))


def converted(*spikes: float, **options) -> GatedModel:
    """The same model in int8; `options` of QuantConfig."""
    model = gated_model(*spikes)
    lsq.convert(model, quant_with(**options))
    return model


def batch(seed: int = 2) -> torch.Tensor:
    """Tokens [8, 33] of a rule: each is three times the one before, plus one, or a random one."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(WORDS, (8, 33), generator=generator)
    follows = torch.rand(made.shape, generator=generator) < 0.8
    for i in range(1, made.shape[1]):
        made[:, i] = torch.where(follows[:, i], (3 * made[:, i - 1] + 1) % WORDS, made[:, i])
    return made


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def train(
    model, monitor=None, steps=1, *, first=0, passes=1, rank=0, parameters=None
) -> list[float]:
    """Return losses of steps from `first` on, on batches of each process's own."""
    parameters = model.parameters() if parameters is None else parameters
    optimizer = torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=3e-3)
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for number in range(passes):
            loss = loss_of(model, batch(10 * rank + passes * step + number))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step()
    return losses
