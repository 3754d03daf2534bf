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

import torch

from lsq.csrc import loader
from lsq.csrc.launch import check, float_define, launch
from lsq.ops import logit_blocks
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.rounding import unpacked
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.declare import Activations, Floats, In, Indices, Out, factor, size
from lsq.program.operation import Operation
from lsq.program.values import Coded, RoundedGradient, Weight


class VocabularyLoss(Operation):
    """The losses of a batch, summed over its rows, and what the backward pass needs."""

    x: In[Coded] | None
    """[M, K]; None in float mode."""
    floats: In[Activations] | None
    """[M, K], in float mode."""
    weight: In[Weight]
    """[P, K]; its values alone in float mode."""
    target: In[Indices]
    """[M]"""
    vocabulary: int
    """V."""
    padding: int
    """The target that counts for nothing."""
    smoothing: float
    loss: Out[Floats]
    """[1]"""
    nll: Out[Floats]
    """[1], without smoothing: for the log, it has no gradient."""
    normaliser: Out[Floats] | None
    """[M], log of the sum of exp of the logits."""
    rounded: Out[RoundedGradient] | None
    """[M, P], the gradient of the logits for a gradient of the loss of 1; its weight_scale is that of the weight."""

    @size
    def rows(self) -> int:
        return self.target.shape[0]

    @size
    def columns(self) -> int:
        return logit_blocks.matrix(self).shape[0]

    @factor
    def target_weight(self) -> float:
        return weights_of(self.vocabulary, self.smoothing)[0]

    @factor
    def each(self) -> float:
        return weights_of(self.vocabulary, self.smoothing)[1]

    def limits(self):
        return {"target": self.vocabulary}

    def reference(self):
        logits = logit_blocks.logits_of(self)
        normaliser = logits.logsumexp(dim=1)
        counted = self.target != self.padding
        nll = torch.where(counted, normaliser - logits[torch.arange(self.rows), self.target], 0.0)
        smooth = torch.where(counted, self.vocabulary * normaliser - logits.sum(dim=1), 0.0)
        loss = (self.target_weight * nll + self.each * smooth).sum()
        rounded = None, None
        if self.rounded is not None:
            rounded = self.rounded.encode(_gradient(self, logits, normaliser))
        return loss, nll.sum(), normaliser, *rounded

    def cpu_scratch(self):
        """Logits of a block, and both losses of each row."""
        rows = (self.rows,), torch.float32
        return [logit_blocks.cpu_block(self), rows, rows]

    def cpu(self, block, *losses):
        for first, logits in logit_blocks.cpu_blocks(self, block):
            loader.call("lsq_VocabularyLoss", self, logits, first, logits.shape[0], *losses)
        for total, each_row in zip((self.loss, self.nll), losses, strict=True):
            total.copy_(each_row.sum(dtype=torch.float64))

    def cuda_scratch(self):
        """The same, and the weight in the dtype of `floats`, where it has another."""
        rows = (self.rows,), torch.float32
        block, *narrow = logit_blocks.cuda_scratch(self)
        return [block, rows, rows, *narrow]

    def cuda(self, block, losses, nlls, *narrow):
        defines = logit_blocks.row_defines(self)
        threads = defines["ROW_THREADS"]
        check(self.rounded is None or self.x is not None, "the gradient of float logits is not rounded: leave it out")

        def kernel(first, rows):
            return launch(
                "vocabulary_loss.cu", "lsq_vocabulary_loss", self, block, block.shape[1], first, losses, nlls,
                grid=rows, block=threads, **defines,
            )  # fmt: skip

        total = launch(
            "vocabulary_loss.cu", "lsq_sum_losses", self, losses, nlls, grid=2, block=threads, **defines
        )
        return [*logit_blocks.cuda_blocks(self, block, narrow, kernel), total]

    def gradient(self, builder) -> None:
        dloss = builder.gradient_of(self.loss)
        x, whole = self.x and self.x.bare(), unpacked(builder, self.weight)
        weight = whole.bare() if self.x else whole
        dlogits = gradient = None
        if self.rounded is None:
            dlogits = builder.tensor("d_logits", (self.rows, self.columns))
            builder.add(
                VocabularyLossGradient(
                    x=x, floats=self.floats, weight=weight, target=self.target, vocabulary=self.vocabulary,
                    padding=self.padding, smoothing=self.smoothing, normaliser=self.normaliser, dloss=dloss,
                    dlogits=dlogits,
                )
            )  # fmt: skip
        else:
            gradient = copy.copy(self.rounded)
            gradient.scale = builder.like("d_logits.scale", self.rounded.scale)
            builder.add(ScaleRows(scale=self.rounded.scale, factor=dloss, out=gradient.scale))
        source = self.floats if self.x is None else self.x.codes
        dx = builder.tensor("d_" + source.name, source.shape)
        builder.add(
            ProjectInputGradient(
                gradient=gradient, floats=dlogits, weight=weight, x=self.x, dx=dx,
                dclip=builder.parameter_gradient(self.x and self.x.clip), dtype=builder.quant.backward_dtype,
            )
        )  # fmt: skip
        builder.add(
            ProjectWeightGradient(
                gradient=gradient, floats=dlogits, x=x, x_floats=self.floats, weight=whole,
                key=builder.key if gradient else None, subsequence=builder.next_subsequence() if gradient else 0,
                lsq=builder.quant.clip_gradient == "lsq", dweight=builder.parameter_gradient(self.weight.values),
                dclip=builder.parameter_gradient(self.weight.clip), dtype=builder.quant.backward_dtype,
            )
        )  # fmt: skip
        builder.accumulate(source, dx)


class VocabularyLossGradient(Operation):
    """The gradient of the logits, which are made again."""

    x: In[Coded] | None
    """[M, K]"""
    floats: In[Activations] | None
    """[M, K]"""
    weight: In[Weight]
    """[P, K]"""
    target: In[Indices]
    """[M]"""
    vocabulary: int
    padding: int
    smoothing: float
    normaliser: In[Floats]
    """[M]"""
    dloss: In[Floats]
    """[1]"""
    dlogits: Out[Activations]
    """[M, P], 0 beyond V and where the target is padding."""

    @size
    def rows(self) -> int:
        return self.target.shape[0]

    @size
    def columns(self) -> int:
        return logit_blocks.matrix(self).shape[0]

    @factor
    def target_weight(self) -> float:
        return weights_of(self.vocabulary, self.smoothing)[0]

    @factor
    def each(self) -> float:
        return weights_of(self.vocabulary, self.smoothing)[1]

    def limits(self):
        return {"target": self.vocabulary}

    def reference(self):
        return (_gradient(self, logit_blocks.logits_of(self), self.normaliser) * self.dloss,)

    def cpu_scratch(self):
        return [logit_blocks.cpu_block(self)]

    def cpu(self, block):
        for first, logits in logit_blocks.cpu_blocks(self, block):
            loader.call("lsq_VocabularyLossGradient", self, logits, first, logits.shape[0])

    def cuda_scratch(self):
        return logit_blocks.cuda_scratch(self)

    def cuda(self, block, *narrow):
        defines = logit_blocks.row_defines(self) | float_define(self.dlogits)

        def kernel(first, rows):
            return launch(
                "vocabulary_loss.cu", "lsq_vocabulary_loss_gradient", self, block, block.shape[1], first, grid=rows,
                block=defines["ROW_THREADS"], **defines,
            )  # fmt: skip

        return logit_blocks.cuda_blocks(self, block, narrow, kernel)


class ScaleRows(Operation):
    """out = scale * factor: a gradient that was rounded for a gradient of the loss of 1, for another one."""

    scale: In[Floats]
    """[M]"""
    factor: In[Floats]
    """[1]"""
    out: Out[Floats]
    """[M]"""

    @size
    def rows(self) -> int:
        return self.scale.shape[0]

    def reference(self):
        return (self.scale * self.factor,)

    def cuda(self):
        return [launch("vocabulary_loss.cu", "lsq_scale_rows", self, grid=max(1, -(-self.rows // 256)))]


def weights_of(vocabulary: int, smoothing: float) -> tuple[float, float]:
    """(weight of the target's term, weight of every word's term), as fairseq's label_smoothed_nll_loss has them."""
    each = smoothing / (vocabulary - 1)
    return 1.0 - smoothing - each, each


def _gradient(op, logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """Reference: d loss / d logits [M, P]."""
    total = op.target_weight + op.each * op.vocabulary
    gradient = (logits - normaliser[:, None]).exp() * total - op.each
    gradient[torch.arange(op.rows), op.target] -= op.target_weight
    gradient = torch.where((op.target == op.padding)[:, None], 0.0, gradient)
    return torch.nn.functional.pad(gradient, (0, op.columns - op.vocabulary))
