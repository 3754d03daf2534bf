"""The projection onto the vocabulary, log-softmax and label smoothing in one operation, without the logits.

With logits l[v], p = softmax(l), smoothing e spread over all V words but counted as fairseq does, e' = e / (V - 1):

    nll = -log p[target];  smooth = -sum_v log p[v];  loss = (1 - e - e') * nll + e' * smooth
    dloss/dl[v] = (1 - e + (V - 1) * e') * p[v] - (1 - e - e') * 1[v = target] - e'

Rows whose target is padding count for nothing. Logits are made a block of rows at a time. Under backward="int8" the
forward pass already rounds their gradient and saves that, int8; otherwise only the normalisers are saved
and the backward pass makes the logits again (integer sums are exact, so they are the same).
M rows, V words, P padded words, K inputs.
"""

from __future__ import annotations

import copy
import dataclasses

import torch

from lsq.csrc import loader
from lsq.csrc.launch import check, float_define, launch
from lsq.ops.prediction import Prediction
from lsq.ops.product_gradients import append_gradients
from lsq.ops.rounding import unpacked
from lsq.program.declare import Activations, Floats, In, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import RoundedGradient


class VocabularyLoss(Operation):
    """The losses of a batch, summed over its rows, and what the backward pass needs."""

    prediction: In[Prediction]
    loss: Out[Floats]
    """[1]"""
    nll: Out[Floats]
    """[1], without smoothing: for the log, it has no gradient."""
    normaliser: Out[Floats] | None
    """[M], log of the sum of exp of the logits."""
    rounded: Out[RoundedGradient] | None
    """[M, P], the gradient of the logits for a gradient of the loss of 1; its weight_scale is that of the weight."""

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
        rounded = None, None
        if self.rounded is not None:
            rounded = self.rounded.encode(given.gradient(logits, normaliser))
        return loss, nll.sum(), normaliser, *rounded

    def cpu_scratch(self):
        """Logits of a block, and both losses of each row."""
        rows = (self.prediction.rows,), torch.float32
        return [self.prediction.cpu_block(), rows, rows]

    def cpu(self, block, *losses):
        for first, logits in self.prediction.cpu_blocks(block):
            loader.call("lsq_VocabularyLoss", self, logits, first, logits.shape[0], *losses)
        for total, each_row in zip((self.loss, self.nll), losses, strict=True):
            total.copy_(each_row.sum(dtype=torch.float64))

    def cuda_scratch(self):
        """The same, and the weight in the dtype of `floats`, where it has another."""
        rows = (self.prediction.rows,), torch.float32
        block, *narrow = self.prediction.cuda_scratch()
        return [block, rows, rows, *narrow]

    def cuda(self, block, losses, nlls, *narrow):
        defines = self.prediction.row_defines()
        threads = defines["ROW_THREADS"]
        codes = self.prediction.x.coded is not None
        check(self.rounded is None or codes, "the gradient of float logits is not rounded: leave it out")

        def kernel(first, rows):
            return launch(
                "vocabulary_loss.cu", "lsq_vocabulary_loss", self, block, block.shape[1], first, losses, nlls,
                grid=rows, block=threads, **defines,
            )  # fmt: skip

        total = launch(
            "vocabulary_loss.cu", "lsq_sum_losses", self, losses, nlls, grid=2, block=threads, **defines
        )
        return [*self.prediction.cuda_blocks(block, narrow, kernel), total]

    def gradient(self, builder) -> None:
        dloss = builder.gradient_of(self.loss)
        given = dataclasses.replace(self.prediction, weight=unpacked(builder, self.prediction.weight))
        dlogits = gradient = None
        if self.rounded is None:
            dlogits = builder.tensor("d_logits", (given.rows, given.columns))
            bare, normaliser = given.bare(), self.normaliser
            builder.add(VocabularyLossGradient(prediction=bare, normaliser=normaliser, dloss=dloss, dlogits=dlogits))
        else:
            gradient = copy.copy(self.rounded)
            gradient.scale = builder.like("d_logits.scale", self.rounded.scale)
            builder.add(ScaleRows(scale=self.rounded.scale, factor=dloss, out=gradient.scale))
        source = given.x.tensor
        dx = builder.tensor("d_" + source.name, source.shape)
        append_gradients(builder, given, given.weight, (dlogits, gradient), dx=dx)
        builder.accumulate(source, dx)


class VocabularyLossGradient(Operation):
    """The gradient of the logits, which are made again."""

    prediction: In[Prediction]
    normaliser: In[Floats]
    """[M]"""
    dloss: In[Floats]
    """[1]"""
    dlogits: Out[Activations]
    """[M, P], 0 beyond V and where the target is padding."""

    def limits(self):
        return self.prediction.limits()

    def reference(self):
        return (self.prediction.gradient(self.prediction.logits(), self.normaliser) * self.dloss,)

    def cpu_scratch(self):
        return [self.prediction.cpu_block()]

    def cpu(self, block):
        for first, logits in self.prediction.cpu_blocks(block):
            loader.call("lsq_VocabularyLossGradient", self, logits, first, logits.shape[0])

    def cuda_scratch(self):
        return self.prediction.cuda_scratch()

    def cuda(self, block, *narrow):
        defines = self.prediction.row_defines() | float_define(self.dlogits)

        def kernel(first, rows):
            return launch(
                "vocabulary_loss.cu", "lsq_vocabulary_loss_gradient", self, block, block.shape[1], first, grid=rows,
                block=defines["ROW_THREADS"], **defines,
            )  # fmt: skip

        return self.prediction.cuda_blocks(block, narrow, kernel)


class ScaleRows(Operation):
    """out = scale * factor: a gradient that was rounded for a gradient of the loss of 1, for another one."""

    scale: In[Floats]
    """[M]"""
    factor: In[Floats]
    """[1]"""
    out: Out[Floats]
    """[M]"""

    rows = extent(0, "scale")

    def reference(self):
        return (self.scale * self.factor,)

    def cuda(self):
        return [launch("vocabulary_loss.cu", "lsq_scale_rows", self, grid=max(1, -(-self.rows // 256)))]
