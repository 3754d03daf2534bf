"""The projection of another model onto its vocabulary; logits are computed when they are read."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from lsq.config import QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import filled
from lsq.layers.in_place import InPlace, class_in_place
from lsq.layers.linear import ALONE, result_dtype
from lsq.layers.logits import Logits
from lsq.layers.module import beside_the_graph, check_words
from lsq.run.frames import active_rehearsal

IGNORED = -1


class Head(InPlace):
    """A torch.nn.Linear [V, H] without a bias, for any V: products pad V to a multiple of 16.

    In training it returns Logits. Projection and cross-entropy then run as one program, which
    stores nothing of size [M, V]. On the CPU, rows with ignored targets are left out.
    """

    pads_rows = True

    def take_place(self, quant: QuantConfig, path: str) -> None:
        quant = quant.at(path, *ALONE)
        self.begin(quant)
        build = partial(programs.vocabulary_logits, quant, 1, *self.weight.shape)
        self.declare(build, measure=False)
        self.let_clips_learn(self.weight.requires_grad)

    def prunable(self) -> list[str]:
        """Return no names: projections onto a vocabulary stay dense."""
        return []

    @beside_the_graph
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = result_dtype(x)
        if self.training and torch.is_grad_enabled() and x.numel():
            return Logits(self, x, len(self.weight), dtype)
        if not x.numel():
            return self.reached(functional.linear(x, self.weight.to(x.dtype)).to(dtype))
        rows = self.logits(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], len(self.weight)).to(dtype)

    @beside_the_graph
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Floats [M, H] -> float32 [M, V]."""
        mode = self.mode_of({"x": rows})
        program = programs.vocabulary_logits(self.quant, len(rows), *self.weight.shape, mode)
        (logits,) = self.execute(program, {"x": rows})
        return logits[:, : len(self.weight)].contiguous()

    @beside_the_graph
    def loss(
        self, rows: torch.Tensor, target: torch.Tensor, *, ignore: int, smoothing: float, mean: bool
    ) -> torch.Tensor:
        """Return PyTorch's cross-entropy of rows [M, H] and target int64 [M], in float32.

        Raises ValueError for a target that is no word and not `ignore`; on a GPU the loss is NaN.
        """
        words, counted = len(self.weight), target != ignore
        count = counted.sum()
        if target.device.type == "cpu":
            rows, target = self._chosen(rows, target, counted, int(count))
        else:
            target = target.where(counted, IGNORED)
        if not len(rows):
            return self.reached(rows).sum() * 0.0 / (0.0 if mean else 1.0)
        program = programs.vocabulary_loss(
            self.quant,
            len(rows),
            *self.weight.shape,
            self.mode_of({"x": rows}),
            padding=IGNORED,
            # PyTorch smooths over all words; this program, as fairseq, over all but the target
            smoothing=smoothing * (words - 1) / words,
        )
        loss, _ = self.execute(program, {"x": rows, "target": target})
        return loss.squeeze(0) / count if mean else loss.squeeze(0)

    def _chosen(
        self, rows: torch.Tensor, target: torch.Tensor, counted: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows whose targets count, padded with zeros to one of a few sizes."""
        if count < len(target):
            index = counted.nonzero().squeeze(1)
            rows, target = rows.index_select(0, index), target.index_select(0, index)
        if count:
            check_words("targets", target, len(self.weight))
        # the padding must not be measured
        exact = self.calibration_due() and active_rehearsal.get() is None
        if count in (0, counted.numel()) or exact:
            return rows, target
        more = filled(count) - count
        target = functional.pad(target, (0, more), value=IGNORED)
        return functional.pad(rows, (0, 0, 0, more)), target


def head_class() -> type[Head]:
    """Return the class of a converted torch.nn.Linear that projects onto a vocabulary."""
    return class_in_place(Head, nn.Linear, "QuantizedHead")
