"""Three operations of which each reads what the one before wrote: an embedding, its norm, and a
loss over words."""

import torch

from lsq.ops.embedding import Embed
from lsq.ops.residual_norm import ResidualNorm, ResidualSum
from lsq.ops.vocabulary_loss import Prediction, VocabularyLoss
from lsq.program.operation import Operation
from lsq.program.values import Rows, Weight
from lsq.quant import Format, Grain

WORDS, HIDDEN = 16, 48


def chain(place: torch.device) -> tuple[Embed, ResidualNorm, VocabularyLoss]:
    """Always the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(place)

    def wanted(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=place)

    tokens, weight = torch.tensor([2, 3, 4], device=place), drawn(WORDS, HIDDEN)
    embed = Embed(
        tokens=tokens,
        positions=tokens,
        weight=weight,
        table=drawn(WORDS, HIDDEN),
        scale=2.0,
        padding=1,
        learned=False,
        x=wanted(3, HIDDEN),
    )
    norm = ResidualNorm(
        sum=ResidualSum(residual=embed.x),
        weight=drawn(HIDDEN),
        bias=drawn(HIDDEN),
        mean=wanted(3),
        rstd=wanted(3),
        out=wanted(3, HIDDEN),
    )
    given = Prediction(
        x=Rows(floats=norm.out),
        weight=Weight(format=Format(name="weight", bits=8, grain=Grain.ROW), values=weight),
        target=tokens + 1,
        vocabulary=WORDS,
        padding=1,
        smoothing=0.1,
    )
    loss = VocabularyLoss(prediction=given, loss=wanted(1), nll=wanted(1))
    return embed, norm, loss


def results(operations: tuple[Operation, ...]) -> list[torch.Tensor]:
    """Everything that they wrote, on the CPU."""
    return [tensor.cpu() for one in operations for tensor in one.outputs]
