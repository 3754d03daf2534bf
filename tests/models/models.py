"""Small models of others, as `convert` finds them."""

import torch
from torch import nn

WIDTH, WORDS = 64, 96


class Conv1D(nn.Module):
    """Like the one of transformers: a weight [nx, nf]."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.05)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(
            *x.shape[:-1], self.nf
        )


class Block(nn.Module):
    """A residual block: a linear layer, a Conv1D, a layer without bias."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix = Conv1D(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.mix(torch.relu(self.up(self.norm(x))))))


class Model(nn.Module):
    """Tokens int64 [B, T] -> logits [B, T, WORDS]; the head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.score = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(seed: int = 1) -> Model:
    """One with the weights of that seed."""
    torch.manual_seed(seed)
    return Model()


def tokens(seed: int = 2) -> torch.Tensor:
    """A batch of them [5, 7]."""
    return torch.randint(WORDS, (5, 7), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """A loss of logits [B, T, WORDS]."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens(3).flatten())
