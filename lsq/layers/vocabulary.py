"""VocabularyProjection: logits, or label-smoothed cross-entropy without logits."""

import torch
from torch import nn

from lsq.config import QuantConfig, check_dimension
from lsq.layers import programs
from lsq.layers.module import ProgramModule, beside_the_graph, check_words, rows_of


class VocabularyProjection(ProgramModule):
    """Projection of float32 [..., H] onto a vocabulary of any size V; int8 products pad V.

    `weight`: an embedding's weight [V, H] to share. `padding_idx`: a target that does not count.
    Raises ValueError if V is below 2, `weight` has another shape, or H is no multiple of 16.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        *,
        quant: QuantConfig | None = None,
        weight: nn.Parameter | None = None,
        padding_idx: int | None = None,
    ):
        quant = quant or QuantConfig()
        super().__init__(quant)
        if vocabulary < 2:
            raise ValueError(f"vocabulary is {vocabulary}; it must have at least 2 words")
        if quant.coded:
            check_dimension("hidden", hidden)
        self.vocabulary, self.hidden = vocabulary, hidden
        self.padding_idx = -1 if padding_idx is None else padding_idx
        if weight is not None and tuple(weight.shape) != (vocabulary, hidden):
            raise ValueError(
                f"weight is {tuple(weight.shape)}; a shared weight must be {(vocabulary, hidden)}"
            )
        self.declare(lambda mode: programs.vocabulary_logits(quant, 1, vocabulary, hidden, mode))
        if weight is not None:
            self.weight = weight
            self.calibrate_weights()

    def prunable(self) -> list[str]:
        """Return no names: projections onto a vocabulary stay dense."""
        return []

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits: x float32 [..., H] -> float32 [..., V]."""
        rows = rows_of(x, self.hidden)
        sizes = rows.shape[0], self.vocabulary, self.hidden
        program = programs.vocabulary_logits(self.quant, *sizes, self.mode(x))
        (logits,) = self.execute(program, {"x": rows})
        return logits.view(*x.shape[:-1], logits.shape[1])[..., : self.vocabulary]

    @beside_the_graph
    def loss(
        self, x: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fairseq's (loss, nll_loss) of x float32 [..., H] and target int64 [...].

        Both are scalars, summed over targets other than padding; only `loss` has a gradient. Raises
        ValueError if label_smoothing is not in [0, 1), or the number of targets is wrong. A target
        outside the vocabulary is a ValueError on the CPU; on a GPU it makes the losses NaN.
        """
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(
                f"label_smoothing is {label_smoothing!r}; it must be at least 0 and below 1"
            )
        rows = rows_of(x, self.hidden)
        if target.numel() != rows.shape[0]:
            raise ValueError(
                f"the targets are {tuple(target.shape)}; they must be {tuple(x.shape[:-1])}"
            )
        target = target.reshape(-1)
        check_words("targets", target, self.vocabulary)
        program = programs.vocabulary_loss(
            self.quant,
            rows.shape[0],
            self.vocabulary,
            self.hidden,
            self.mode(x),
            padding=self.padding_idx,
            smoothing=label_smoothing,
        )
        loss, nll = self.execute(program, {"x": rows, "target": target})
        return loss.squeeze(0), nll.squeeze(0).detach()
