"""The projection onto the vocabulary for a search: it keeps only wanted scores of each row.

    log_probability = logit - log(sum of exp(logits))

Logits are never stored, unless all log-probabilities are wanted. On CUDA a tile leaves the largest
logit of every eight words. The K best words of a row are among the K best of these groups, so the
logits of those groups and of the wanted words are computed again. R rows, V words, P padded words,
H inputs, K best words, W wanted words.
"""

from __future__ import annotations

from lsq import gemm
from lsq.native.launch import check
from lsq.ops.packed_weight import PackedWeight
from lsq.program.declare import Floats, In, Indices, Out, extent
from lsq.program.operation import Operation
from lsq.program.values import Coded, Weight


class NextWords(Operation):
    """The best words of each row, the scores of the wanted words, or the scores of all words.

    Raises:
        ValueError: it has none or both weights, or not the one that its device reads; on CUDA, P or
            H is no multiple of 16.
    """

    x: In[Coded]  # [R, H]
    weight: In[Weight] | None  # [P, H], codes and scale: on CUDA.
    packed_weight: In[PackedWeight] | None  # [P, H], instead of `weight`: on the CPU.
    vocabulary: int  # V, at most P.
    wanted: In[Indices] | None  # [R, W]
    words: Out[Indices] | None
    """[R, K], best first; of equal logits the lower word first."""
    scores: Out[Floats] | None  # [R, K], log-probabilities of `words`.
    wanted_scores: Out[Floats] | None  # [R, W], log-probabilities of `wanted`.
    every: Out[Floats] | None  # [R, V], log-probabilities of all words.

    rows = extent(0, "x.codes")
    columns = extent(0, "weight.codes", "packed_weight.scale")  # P.
    best = extent(1, "words")  # K.
    asked = extent(1, "wanted")  # W.

    def __post_init__(self):
        check(
            (self.weight is None) != (self.packed_weight is None),
            "NextWords reads one weight: give it `packed_weight` on the CPU, or `weight`, of codes,"
            " on CUDA",
        )

    def limits(self):
        return {"wanted": self.vocabulary}

    def reference(self):
        weight = self.packed_weight or self.weight
        codes = weight.codes if self.packed_weight is None else weight.codes()
        sums = gemm.reference(self.x.codes, codes[: self.vocabulary]).float()
        logits = sums * (self.x.scale * weight.scale[: self.vocabulary])
        found = logits.log_softmax(dim=1)
        order = logits.argsort(dim=1, descending=True, stable=True)[:, : self.best]
        asked = None if self.wanted is None else found.gather(1, self.wanted)
        return {
            "words": order,
            "scores": found.gather(1, order),
            "wanted_scores": asked,
            "every": found,
        }

    def cpu_scratch(self):
        check(
            self.packed_weight is not None,
            "NextWords reads packed weights on the CPU: give it `packed_weight`",
        )
        return ()
