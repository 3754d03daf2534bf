"""Both gradients of a vocabulary's loss from the two kept words of each row, whose gradients are no
codes.

    dx[m] = sum over j of g[j, m] * dloss * weight[kept[j, m]]
    dweight[v] += sum over j and m with kept[j, m] = v of g[j, m] * dloss * x[m]

Kept are the target and the likeliest other word. The gradient of a target's logit is up to a
thousand times as large as that of most words, and a model that wavers between two words gives the
other one nearly as much. One scale for all would round most words to 0 or to a whole step, so these
two stay floats (see lsq.ops.vocabulary_loss), and the codes of a row share the scale of the rest. M
rows, V words, P padded words, K inputs.
"""

from __future__ import annotations

import torch

from lsq.native.launch import FLOATS
from lsq.ops.prediction import KeptWords, Prediction
from lsq.program.declare import Activations, Floats, In, Out, Parameters, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Weight


class KeptInputGradient(Operation):
    """The part of the gradient of x that comes from kept words, before the rounding of x."""

    prediction: In[Prediction]
    """Of codes."""
    kept: In[KeptWords]
    """Of VocabularyLoss."""
    dloss: In[Floats]
    """[1]"""
    dx: Out[Activations]
    """[M, K]"""

    rows = extent(0, "dx")
    columns = extent(1, "dx")

    def limits(self):
        return kept_limits(self)

    def reference(self):
        weight = self.prediction.weight
        parts = [
            (gradient * self.dloss)[:, None]
            * (weight.codes[word].float() * weight.scale[word, None])
            for word, gradient in self.kept.words(self.prediction)
        ]
        return {"dx": parts[0] + parts[1]}


class KeptWeightGradient(Operation):
    """The gradient of the weight with the part that comes from kept words; the rows of a word are
    added in order.

    What lies beyond a clip gets none of it, as in ProjectWeightGradient.
    """

    prediction: In[Prediction]
    """Of codes."""
    kept: In[KeptWords]
    """Of VocabularyLoss."""
    dloss: In[Floats]
    """[1]"""
    weight: In[Weight]
    """[P, K], with values [V, K] and clip [V] or [1]."""
    others: In[Parameters]
    """[V, K], the gradient without it; may be the memory of dweight."""
    dweight: Out[Parameters]
    """[V, K], of the dtype of the weight."""

    columns = extent(1, "dweight")
    clips = extent(0, "weight.clip")

    @size
    def rows(self) -> int:
        """Two for each row of x: the targets of all, then their likeliest other words."""
        return 2 * self.prediction.rows

    @size
    def dweight_dtype(self) -> int:
        return FLOATS[self.dweight.dtype]

    def limits(self):
        return kept_limits(self)

    def reference(self):
        given, weight = self.prediction, self.weight
        found = torch.zeros(self.dweight.shape, dtype=torch.float32)
        for word, gradient in self.kept.words(given):
            found.index_add_(0, word, (gradient * self.dloss)[:, None] * given.x.coded.decode())
        outside = (weight.values.float().abs() > weight.clip.reshape(-1, 1)) & (not weight.absmax)
        dweight = self.others + torch.where(outside, 0.0, found)
        return {"dweight": dweight.to(self.dweight.dtype)}


def kept_limits(operation: KeptInputGradient | KeptWeightGradient) -> dict[str, int]:
    """See Operation.limits."""
    return {**operation.prediction.limits(), "kept.likeliest": operation.prediction.vocabulary}
