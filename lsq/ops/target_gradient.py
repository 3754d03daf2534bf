"""What the target's own logit adds to both gradients of a vocabulary's loss, where its gradient is no code.

    dx[m] = g[m] * dloss * weight[target[m]]          dweight[v] += sum over m with target[m] = v of g[m] * dloss * x[m]

The gradient of a target's logit is up to a thousand times as large as that of any other word. One scale for both would
round nearly all words to 0 or to a whole step, so g stays a float (see lsq.ops.vocabulary_loss), and the codes of a row
share the scale of its other words. M rows, V words, P padded words, K inputs.
"""

from __future__ import annotations

import torch

from lsq.csrc.geometry import MANY_BLOCKS, row_blocks, row_defines
from lsq.csrc.launch import FLOATS, float_define, launch
from lsq.ops.embedding import scatter_launches, scatter_scratch
from lsq.ops.kernels import float_operand
from lsq.ops.prediction import Prediction
from lsq.program.declare import Activations, Floats, In, Out, Parameters, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Weight


class TargetInputGradient(Operation):
    """The part of the gradient of x that comes from the targets, before the rounding of x."""

    prediction: In[Prediction]
    """Of codes."""
    target_gradient: In[Floats]
    """[M], of VocabularyLoss."""
    dloss: In[Floats]
    """[1]"""
    dx: Out[Activations]
    """[M, K]"""

    rows = extent(0, "dx")
    columns = extent(1, "dx")

    def limits(self):
        return self.prediction.limits()

    def reference(self):
        given = self.prediction
        own = torch.where(given.target == given.padding, 0.0, self.target_gradient * self.dloss)
        words = given.weight.codes[given.target].float() * given.weight.scale[given.target, None]
        return (own[:, None] * words,)

    def cuda(self):
        return [
            launch(
                "target_gradient.cu", "lsq_target_input_gradient", self,
                grid=row_blocks(self.rows, self.columns, most=MANY_BLOCKS), **float_define(self.dx),
                **row_defines(self.columns),
            )
        ]  # fmt: skip


class TargetWeightGradient(Operation):
    """The gradient of the weight with the part that comes from the targets; the rows of a word are added in order.

    What lies beyond a clip gets none of it, as in ProjectWeightGradient.
    """

    prediction: In[Prediction]
    """Of codes."""
    target_gradient: In[Floats]
    """[M], of VocabularyLoss."""
    dloss: In[Floats]
    """[1]"""
    weight: In[Weight]
    """[P, K], with values [V, K] and clip [V] or [1]."""
    others: In[Parameters]
    """[V, K], the gradient without it; may be the memory of dweight."""
    dweight: Out[Parameters]
    """[V, K], of the dtype of the weight."""

    rows = extent(0, "target_gradient")
    columns = extent(1, "dweight")
    clips = extent(0, "weight.clip")

    @size
    def dweight_dtype(self) -> int:
        return FLOATS[self.dweight.dtype]

    def limits(self):
        return self.prediction.limits()

    def reference(self):
        given, weight = self.prediction, self.weight
        own = torch.where(given.target == given.padding, 0.0, self.target_gradient * self.dloss)
        found = torch.zeros(self.dweight.shape, dtype=torch.float32)
        found.index_add_(0, given.target, own[:, None] * given.x.coded.decode())
        outside = (weight.values.float().abs() > weight.clip.reshape(-1, 1)) & (not weight.absmax)
        return ((self.others + torch.where(outside, 0.0, found)).to(self.dweight.dtype),)

    def cuda_scratch(self):
        return scatter_scratch(self.rows, self.columns)

    def cuda(self, before, ordered, partial):
        copied = [] if self.others is self.dweight else [float_operand(self.others, None, self.dweight)]
        return [*copied, *scatter_launches(self, before, ordered, partial, tables=1, TARGETS=1, FLOAT=0)]
