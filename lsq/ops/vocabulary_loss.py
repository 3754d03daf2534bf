"""Projection onto the vocabulary, log-softmax and label smoothing in one operation without logits.

For logits l[v], p = softmax(l). The smoothing e is spread over all V words, but counted as in
fairseq, e' = e / (V - 1):

    nll = -log p[target];  smooth = -sum_v log p[v];  loss = (1 - e - e') * nll + e' * smooth
    g[v] = dloss/dl[v] = (1 - e + (V - 1) * e') * p[v] - e' - (1 - e - e') * 1[v = target]

Rows whose target is padding add nothing. Logits are never stored: the product's epilogue adds them
up at once, and the backward pass computes them again (integer sums are exact, so logits are equal).
Under backward="int8" their gradient, times the scales s[v] of the weight, is rounded in the
epilogue. An epilogue sees no whole row, so it cannot find the row's largest magnitude. The scale of
a row follows from a bound instead, which the forward pass finds:

    |g[v] * s[v]| <= max(|g[target] * s[target]|, (1 - e + (V - 1) * e') * max of p[v] * s[v], e' *
    max of s[v])

The maximum of p[v] * s[v] is over all words but the target: their gradients are between -e' and the
multiple of p[v].

Two words of each row are kept: the target, and the other word with the largest p[v] * s[v]. Codes
and bound leave them out; their gradients stay floats (KeptInputGradient, KeptWeightGradient). The
gradient of a target's logit is up to a thousand times that of most words, and a model that wavers
between two words gives the other word nearly as much. One scale for all would round most words to 0
or to a whole step. If the weight's clip is learned, it needs the gradients of all words as codes,
and none are kept. M rows, V words, P padded words, K inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from lsq import gemm
from lsq.native import loader
from lsq.native.launch import FLOATS, check
from lsq.ops.rounding import unpacked
from lsq.ops.weight_gradient import append_gradients
from lsq.program.declare import (
    Activations,
    Floats,
    In,
    Indices,
    Out,
    Parameters,
    Value,
    extent,
    factor,
    size,
)
from lsq.program.operation import Operation, Spec
from lsq.program.values import RoundedGradient, Rows, Weight

BLOCK_ROWS = 256  # Rows of float logits in memory at a time.
BLOCK_COLUMNS = 256  # Words of one partial sum on the CPU, independent of the product's blocks.


class KeptWords(Value):
    """Two words of each row with float gradients: the target and the likeliest other word."""

    likeliest: Indices
    """[M], the other word, with the largest p times scale; 0 where the target is padding."""
    gradient: Floats
    """[2, M], gradients of both logits, for a loss gradient of 1; 0 where the target is padding."""

    def words(self, given: Prediction) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Reference: yield (words [M], their gradients [M]) for the targets, then the others."""
        for word, gradient in zip((given.target, self.likeliest), self.gradient, strict=True):
            yield word, torch.where(given.target == given.padding, 0.0, gradient)


class Prediction(Value):
    """Inputs of VocabularyLoss and its gradient, which both compute the logits."""

    x: In[Rows]  # [M, K]
    weight: In[Weight]  # [P, K]; its values alone in float mode.
    target: In[Indices]  # [M]
    vocabulary: int  # V.
    padding: int  # Target of rows that count for nothing.
    smoothing: float

    rows = extent(0, "target")  # M.
    columns = extent(0, "weight.matrix")  # P.

    @size
    def block_columns(self) -> int:
        return BLOCK_COLUMNS

    @factor
    def each(self) -> float:
        """Weight e' of every word's term, as in fairseq's label_smoothed_nll_loss."""
        return self.smoothing / (self.vocabulary - 1)

    @factor
    def target_weight(self) -> float:
        return 1.0 - self.smoothing - self.each

    def bare(self) -> Prediction:
        """Return the prediction with codes and scales alone."""
        return dataclasses.replace(self, x=self.x.bare(), weight=self.weight.bare())

    def limits(self, kept: KeptWords | None = None) -> dict[str, int]:
        """See Operation.limits; padded words are no targets."""
        found = {"prediction.target": self.vocabulary}
        return found if kept is None else found | {"kept.likeliest": self.vocabulary}

    def logits(self) -> torch.Tensor:
        """Reference: the logits [M, V]."""
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
        """Reference: the other word [M] with the largest p times scale, and the gradients [2, M] of
        the logits of target and other word; 0 for the other word if it is the target."""
        rows = torch.arange(self.rows)
        likeliest = self._of_others(logits, normaliser).argmax(dim=1)
        likeliest = torch.where(self.target == self.padding, 0, likeliest)
        gradient = self.gradient(logits, normaliser)
        other = torch.where(likeliest == self.target, 0.0, gradient[rows, likeliest])
        return likeliest, torch.stack([gradient[rows, self.target], other])

    def bound(self, logits: torch.Tensor, normaliser: torch.Tensor, kept: bool) -> torch.Tensor:
        """Reference: the bound [M] of |gradient(..)| times the scales of the weight.

        It leaves out the target, and the other word if words are `kept`.
        """
        multiples = self._of_others(logits, normaliser)
        if kept:
            multiples.scatter_(1, multiples.argmax(dim=1, keepdim=True), 0.0)
        total = self.target_weight + self.each * self.vocabulary
        least = self.each * self.weight.scale[: self.vocabulary].amax()
        bound = (multiples.amax(dim=1) * total).maximum(least)
        return torch.where(self.target == self.padding, 0.0, bound)

    def _of_others(self, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
        """Return p times the scales of the weight [M, V], 0 for targets."""
        probability = (logits - normaliser[:, None]).exp()
        probability[torch.arange(self.rows), self.target] = 0.0
        return probability * self.weight.scale[: self.vocabulary]

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // BLOCK_COLUMNS)

    def cpu_memory(self, product: str) -> Spec:
        """Return the scratch memory of `multiply`."""
        if self.x.coded is not None:
            return gemm.scratch_for(product, self.rows, *self.weight.matrix.shape)
        return (min(self.rows, BLOCK_ROWS), self.columns), torch.float32

    def multiply(
        self, product: str, operation: Operation, memory: torch.Tensor, *arguments: torch.Tensor
    ) -> None:
        """Compute the logits on the CPU; loops of an operation read them (lsq.gemm.multiply).

        In float mode `memory` holds a block of rows at a time, which `lsq_end_<product>` reads.
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


class KeptInputGradient(Operation):
    """The part of the gradient of x that comes from kept words, before the rounding of x:

    dx[m] = sum over j of g[j, m] * dloss * weight[kept[j, m]]
    """

    prediction: In[Prediction]  # Of codes.
    kept: In[KeptWords]  # Of VocabularyLoss.
    dloss: In[Floats]  # [1]
    dx: Out[Activations]  # [M, K]

    rows = extent(0, "dx")
    columns = extent(1, "dx")

    def limits(self):
        return self.prediction.limits(self.kept)

    def reference(self):
        weight = self.prediction.weight
        parts = [
            (gradient * self.dloss)[:, None] * (weight.codes[word] * weight.scale[word, None])
            for word, gradient in self.kept.words(self.prediction)
        ]
        return {"dx": parts[0] + parts[1]}


class KeptWeightGradient(Operation):
    """The gradient of the weight, with the part that comes from kept words added in order of rows:

    dweight[v] += sum over j and m with kept[j, m] = v of g[j, m] * dloss * x[m]

    Values beyond a clip get none of it, as in ProjectWeightGradient.
    """

    prediction: In[Prediction]  # Of codes.
    kept: In[KeptWords]  # Of VocabularyLoss.
    dloss: In[Floats]  # [1]
    weight: In[Weight]  # [P, K], with values [V, K] and clip [V] or [1].
    others: In[Parameters]  # [V, K], the gradient without that part; may be the memory of dweight.
    dweight: Out[Parameters]  # [V, K], of the dtype of the weight.

    columns = extent(1, "dweight")
    clips = extent(0, "weight.clip")

    @size
    def rows(self) -> int:
        """2 M: the targets of all rows of x, then their likeliest other words."""
        return 2 * self.prediction.rows

    @size
    def dweight_dtype(self) -> int:
        return FLOATS[self.dweight.dtype]

    def limits(self):
        return self.prediction.limits(self.kept)

    def reference(self):
        given, weight = self.prediction, self.weight
        found = torch.zeros(self.dweight.shape, dtype=torch.float32)
        for word, gradient in self.kept.words(given):
            found.index_add_(0, word, (gradient * self.dloss)[:, None] * given.x.coded.decode())
        if not weight.absmax:
            found[weight.values.float().abs() > weight.clip.reshape(-1, 1)] = 0.0
        dweight = self.others + found
        return {"dweight": dweight.to(self.dweight.dtype)}


PRODUCT, GRADIENT_PRODUCT = "vocabulary_loss", "vocabulary_loss_gradient"
"""Names of the products in lsq.gemm."""


class VocabularyLoss(Operation):
    """The losses of a batch, summed over its rows, and the tensors that the backward pass needs."""

    prediction: In[Prediction]
    loss: Out[Floats]  # [1]
    nll: Out[Floats]  # [1], without smoothing, for the log; it has no gradient.
    normaliser: Out[Floats] | None  # [M], log of the sum of exp of the logits.
    bound: Out[Floats] | None
    """[M], bound of |gradient of the logits| * scale without kept words, for a loss gradient of 1;
    0 where the target is padding."""
    kept: Out[KeptWords] | None

    def limits(self):
        return self.prediction.limits()

    def reference(self):
        given = self.prediction
        logits = given.logits()
        normaliser = logits.logsumexp(dim=1)
        counted = given.target != given.padding
        nll = torch.where(counted, normaliser - logits[torch.arange(given.rows), given.target], 0.0)
        smooth = torch.where(counted, given.vocabulary * normaliser - logits.sum(dim=1), 0.0)
        loss = (given.target_weight * nll + given.each * smooth).sum()
        results = {"loss": loss, "nll": nll.sum(), "normaliser": normaliser}
        if self.bound is None:
            return results
        likeliest, gradient = given.kept(logits, normaliser)
        bound = given.bound(logits, normaliser, self.kept is not None)
        if self.kept is None:
            bound = bound.maximum((gradient[0] * given.weight.scale[given.target]).abs())
        return results | {"bound": bound, "kept": {"likeliest": likeliest, "gradient": gradient}}

    def cpu_scratch(self):
        """Return memory for six sums of each row and column block, targets' logits, the product."""
        given = self.prediction
        parts = (6, given.column_blocks, given.rows), torch.float32
        return [parts, ((given.rows,), torch.float32), given.cpu_memory(PRODUCT)]

    def cpu(self, parts, chosen, memory):
        self.prediction.multiply(PRODUCT, self, memory, parts, chosen)
        loader.call("lsq_finish_vocabulary_loss", self, parts, chosen)

    def gradient(self, builder) -> None:
        weight = unpacked(builder, self.prediction.weight)
        given = dataclasses.replace(self.prediction, weight=weight)
        size = given.rows, given.columns
        dlogits = rounded = None
        if self.bound is None:
            dlogits = builder.tensor("d_logits", size)
        else:
            rounded = builder.rounded_gradient("d_logits", size, given.weight.scale)
        dloss = builder.gradient_of(self.loss)
        builder.add(
            VocabularyLossGradient(
                prediction=given.bare(),
                normaliser=self.normaliser,
                bound=self.bound,
                dloss=dloss,
                dlogits=dlogits,
                rounded=rounded,
                kept=self.kept,
            )
        )
        source = given.x.tensor
        dx = builder.tensor("d_" + source.name, source.shape)
        of_kept = {"prediction": given.bare(), "kept": self.kept, "dloss": dloss}
        accumulated = None
        if self.kept is not None and builder.needs_gradient(source):
            accumulated = dx
            builder.add(KeptInputGradient(**of_kept, dx=dx))
        dweight = append_gradients(
            builder, given, given.weight, (dlogits, rounded), dx=dx, accumulated=accumulated
        )
        if self.kept is not None and dweight is not None:
            builder.add(
                KeptWeightGradient(**of_kept, weight=given.weight, others=dweight, dweight=dweight)
            )
        builder.accumulate(source, dx)


class VocabularyLossGradient(Operation):
    """The gradient of the logits, which it computes again: floats, or codes.

    Raises:
        ValueError: it has neither dlogits alone nor rounded together with bound.
    """

    prediction: In[Prediction]
    normaliser: In[Floats]  # [M]
    bound: In[Floats] | None  # [M], of VocabularyLoss.
    kept: In[KeptWords] | None  # Of VocabularyLoss: the codes of these words are 0.
    dloss: In[Floats]  # [1]
    dlogits: Out[Activations] | None  # [M, P], 0 beyond V and where the target is padding.
    rounded: Out[RoundedGradient] | None  # [M, P]; its weight_scale is that of the weight.

    def __post_init__(self):
        check(
            (self.dlogits is None) == (self.rounded is not None) == (self.bound is not None),
            "a VocabularyLossGradient has dlogits, or bound and rounded; give it one of these",
        )

    def limits(self):
        return self.prediction.limits(self.kept)

    def reference(self):
        gradient = self.prediction.gradient(self.prediction.logits(), self.normaliser)
        if self.rounded is None:
            return {"dlogits": gradient * self.dloss}
        rounded = self.rounded.encode(gradient, self.bound)
        rounded["scale"] = rounded["scale"] * self.dloss
        if self.kept is not None:
            for word, _ in self.kept.words(self.prediction):
                rounded["codes"][torch.arange(self.prediction.rows), word] = 0
        return {"rounded": rounded}

    def cpu_scratch(self):
        return [self.prediction.cpu_memory(GRADIENT_PRODUCT)]

    def cpu(self, memory):
        self.prediction.multiply(GRADIENT_PRODUCT, self, memory)
