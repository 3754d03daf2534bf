"""Predictions: logits of words, made from rows and read as they are made, and the target words.

M rows, V words, P padded words, K inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from lsq import gemm
from lsq.native import loader
from lsq.program.declare import Floats, In, Indices, Value, extent, factor, size
from lsq.program.operation import Operation, Spec
from lsq.program.values import Rows, Weight

BLOCK_ROWS = 256
"""Rows of float logits that exist at a time."""
BLOCK_COLUMNS = 256
"""Words whose logits the CPU adds up apart, whatever the blocks of the product."""


class KeptWords(Value):
    """Two words of each row whose gradient is no code: the target and another; see
    lsq.ops.kept_gradient."""

    likeliest: Indices
    """[M], the other word: that of the largest multiple of p by the scale of the weight; 0 where
    the target is padding.
    """
    gradient: Floats
    """[2, M], of the logits of the target and of that word, for a gradient of the loss of 1; 0
    where the target is padding.
    """

    def words(self, given: Prediction) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Reference: (words [M], their gradients [M]), of the targets, then of the others."""
        for word, gradient in zip((given.target, self.likeliest), self.gradient, strict=True):
            yield word, torch.where(given.target == given.padding, 0.0, gradient)


class Prediction(Value):
    """Inputs of VocabularyLoss and its gradient; both make the logits."""

    x: In[Rows]
    """[M, K]"""
    weight: In[Weight]
    """[P, K]; its values alone in float mode."""
    target: In[Indices]
    """[M]"""
    vocabulary: int
    """V."""
    padding: int
    """The target that counts for nothing."""
    smoothing: float

    rows = extent(0, "target")
    """M."""
    columns = extent(0, "weight.matrix")
    """P."""

    @size
    def block_columns(self) -> int:
        return BLOCK_COLUMNS

    @factor
    def each(self) -> float:
        """The weight of every word's term, as fairseq's label_smoothed_nll_loss has it."""
        return self.smoothing / (self.vocabulary - 1)

    @factor
    def target_weight(self) -> float:
        """The weight of the target's term."""
        return 1.0 - self.smoothing - self.each

    def bare(self) -> Prediction:
        """The prediction with codes and scales alone."""
        return dataclasses.replace(self, x=self.x.bare(), weight=self.weight.bare())

    def limits(self) -> dict[str, int]:
        """See Operation.limits. Padded words are no targets."""
        return {"prediction.target": self.vocabulary}

    def logits(self) -> torch.Tensor:
        """Reference: [M, V]."""
        if self.x.coded is None:
            return (self.x.floats @ self.weight.matrix.t())[:, : self.vocabulary]
        sums = gemm.reference(self.x.tensor, self.weight.codes).to(torch.float32)
        return (sums * (self.x.scale * self.weight.scale))[:, : self.vocabulary]

    def gradient(self, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """Reference: d loss / d logits [M, P]."""
        total = self.target_weight + self.each * self.vocabulary
        gradient = (logits - normaliser[:, None]).exp() * total - self.each
        gradient[torch.arange(self.rows), self.target] -= self.target_weight
        gradient = torch.where((self.target == self.padding)[:, None], 0.0, gradient)
        return torch.nn.functional.pad(gradient, (0, self.columns - self.vocabulary))

    def kept(
        self, logits: torch.Tensor, normaliser: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: of each row the other word with the largest multiple of p by the weight's
        scale, [M], and the gradients of the logits of target and this word, [2, M]; 0 for a word
        that is the target.
        """
        rows = torch.arange(self.rows)
        likeliest = self._of_others(logits, normaliser).argmax(dim=1)
        likeliest = torch.where(self.target == self.padding, 0, likeliest)
        gradient = self.gradient(logits, normaliser)
        other = torch.where(likeliest == self.target, 0.0, gradient[rows, likeliest])
        return likeliest, torch.stack([gradient[rows, self.target], other])

    def bound(self, logits: torch.Tensor, normaliser: torch.Tensor, kept: bool) -> torch.Tensor:
        """Reference: of the magnitudes in each row of gradient(..) times the scales of the weight,
        [M].

        The target's magnitude does not count, nor does that of the other kept word if words are
        kept.
        """
        multiples = self._of_others(logits, normaliser)
        if kept:
            multiples.scatter_(1, multiples.argmax(dim=1, keepdim=True), 0.0)
        total = self.target_weight + self.each * self.vocabulary
        least = self.each * self.weight.scale[: self.vocabulary].amax()
        return torch.where(
            self.target == self.padding, 0.0, (multiples.amax(dim=1) * total).maximum(least)
        )

    def _of_others(self, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """p times the scales of the weight [M, V], 0 for targets."""
        probability = (logits - normaliser[:, None]).exp()
        probability[torch.arange(self.rows), self.target] = 0.0
        return probability * self.weight.scale[: self.vocabulary]

    @property
    def column_blocks(self) -> int:
        """Blocks of columns whose logits the CPU adds up apart."""
        return -(-self.columns // BLOCK_COLUMNS)

    def cpu_memory(self, product: str) -> Spec:
        """Scratch memory of `multiply`."""
        if self.x.coded is not None:
            return gemm.scratch_for(product, self.rows, *self.weight.matrix.shape)
        return (min(self.rows, BLOCK_ROWS), self.columns), torch.float32

    def multiply(
        self, product: str, operation: Operation, memory: torch.Tensor, *arguments: torch.Tensor
    ) -> None:
        """Make the logits on the CPU, and let the loops of an operation read them; see
        lsq.gemm.multiply.

        Of floats, `memory` holds a block of rows at a time, which `lsq_end_<product>` reads.
        """
        if self.rows == 0:
            return
        if self.x.coded is not None:
            gemm.multiply(product, operation, self.x.tensor, self.weight.codes, memory, *arguments)
            return
        for first in range(0, self.rows, memory.shape[0]):
            rows = self.x.floats[first : first + memory.shape[0]]
            logits = torch.mm(rows, self.weight.matrix.t(), out=memory[: rows.shape[0]])
            loader.call(f"lsq_end_{product}", operation, logits, first, rows.shape[0], *arguments)
