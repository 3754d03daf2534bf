"""Projection onto the vocabulary, log-softmax and label smoothing in one operation without logits.

With logits l[v], p = softmax(l), smoothing e spread over all V words but counted as fairseq does,
e' = e / (V - 1):

    nll = -log p[target];  smooth = -sum_v log p[v];  loss = (1 - e - e') * nll + e' * smooth
    g[v] = dloss/dl[v] = (1 - e + (V - 1) * e') * p[v] - e' - (1 - e - e') * 1[v = target]

Rows whose target is padding count for nothing. Nobody keeps logits: the end of the product adds
them up as they are made, and the backward pass makes them again (integer sums are exact, so they
are the same). Under backward="int8" their gradient, times the scales s[v] of the weight, is rounded
where it is made. No product can end in the largest magnitude of a row, so the scale of a row is
that of a bound, which the forward pass knows:

    |g[v] * s[v]| <= max(|g[target] * s[target]|, (1 - e + (V - 1) * e') * max of p[v] * s[v], e' *
    max of s[v])

with the first maximum over all words but the target: their gradient lies between -e' and the
multiple of p[v]. Two words of each row, the target and that of the largest multiple, are left out
of codes and bound, and their gradients stay floats, wherever the clip of the weight does not learn
(lsq.ops.kept_gradient); a clip that learns needs them among the codes. M rows, V words, P padded
words, K inputs.
"""

from __future__ import annotations

import dataclasses

import torch

from lsq.native import loader
from lsq.native.launch import check
from lsq.ops.kept_gradient import KeptInputGradient, KeptWeightGradient
from lsq.ops.prediction import KeptWords, Prediction
from lsq.ops.product_gradients import append_gradients
from lsq.ops.rounding import unpacked
from lsq.program.declare import Activations, Floats, In, Out
from lsq.program.operation import Operation
from lsq.program.values import RoundedGradient

PRODUCT, GRADIENT_PRODUCT = "vocabulary_loss", "vocabulary_loss_gradient"
"""Names of the products of codes in lsq.gemm."""


class VocabularyLoss(Operation):
    """The losses of a batch, summed over its rows, and what the backward pass needs."""

    prediction: In[Prediction]
    loss: Out[Floats]
    """[1]"""
    nll: Out[Floats]
    """[1], without smoothing: for the log, it has no gradient."""
    normaliser: Out[Floats] | None
    """[M], log of the sum of exp of the logits."""
    bound: Out[Floats] | None
    """[M], of the magnitudes of the gradient of the logits times the scales of the weight, for a
    gradient of the loss of 1, without those of kept words; 0 where the target is padding.
    """
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
        """Sums of blocks of columns, six numbers of each row; the logits of the targets; memory of
        the product."""
        given = self.prediction
        parts = (6, given.column_blocks, given.rows), torch.float32
        return [parts, ((given.rows,), torch.float32), given.cpu_memory(PRODUCT)]

    def cpu(self, parts, chosen, memory):
        self.prediction.multiply(PRODUCT, self, memory, parts, chosen)
        loader.call("lsq_finish_vocabulary_loss", self, parts, chosen)

    def gradient(self, builder) -> None:
        given = dataclasses.replace(
            self.prediction, weight=unpacked(builder, self.prediction.weight)
        )
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
    """The gradient of the logits, which are made again: floats, or codes.

    Raises:
        ValueError: it shall go to both, or codes are to be made without their bound.
    """

    prediction: In[Prediction]
    normaliser: In[Floats]
    """[M]"""
    bound: In[Floats] | None
    """[M], of VocabularyLoss."""
    kept: In[KeptWords] | None
    """Of VocabularyLoss: the codes of these words are 0."""
    dloss: In[Floats]
    """[1]"""
    dlogits: Out[Activations] | None
    """[M, P], 0 beyond V and where the target is padding."""
    rounded: Out[RoundedGradient] | None
    """[M, P], in place of it; its weight_scale is that of the weight."""

    def __post_init__(self):
        check(
            (self.dlogits is None) == (self.rounded is not None) == (self.bound is not None),
            "a VocabularyLossGradient has dlogits, or bound and rounded; give it one of these",
        )

    def limits(self):
        kept = {} if self.kept is None else {"kept.likeliest": self.prediction.vocabulary}
        return {**self.prediction.limits(), **kept}

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
