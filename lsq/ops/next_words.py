"""The projection onto the vocabulary whose end keeps what a search wants of each row: for decoding on the CPU.

    log_probability = logit - log(sum of exp(logits))

The logits are never stored, unless all log-probabilities are wanted. R rows, V words, K best ones, W wanted ones.
"""

from __future__ import annotations

from lsq import gemm
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Floats, In, Indices, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded


class NextWords(Operation):
    """The best words of each row, and those that are asked for, or all."""

    x: In[Coded]
    """[R, H]"""
    weight: In[PackedWeight]
    """[P, H]"""
    vocabulary: int
    """V, at most P."""
    wanted: In[Indices] | None
    """[R, W]"""
    words: Out[Indices] | None
    """[R, K], the best ones, best first; of equal logits the lower number first."""
    scores: Out[Floats] | None
    """[R, K], log-probabilities of these."""
    wanted_scores: Out[Floats] | None
    """[R, W], of `wanted`."""
    every: Out[Floats] | None
    """[R, V], of all words."""

    rows = extent(0, "x.codes")
    best = extent(1, "words")
    """K."""
    asked = extent(1, "wanted")
    """W."""

    def limits(self):
        return {"wanted": self.vocabulary}

    def reference(self):
        sums = gemm.reference(self.x.codes, self.weight.codes()[: self.vocabulary]).float()
        logits = sums * (self.x.scale * self.weight.scale[: self.vocabulary])
        found = logits.log_softmax(dim=1)
        order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.best]
        asked = None if self.wanted is None else found.gather(1, self.wanted)
        return order, found.gather(1, order), asked, found
