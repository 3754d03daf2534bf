"""Decoding: what a search asks of a model, the search, and the engine that answers in int8. Nothing here needs fairseq.

R hypotheses that are still open, "rows", of all sentences of a batch; V words.
"""

from lsq.decode.hypothesis import Hypothesis
from lsq.decode.options import SearchOptions
from lsq.decode.steps import Candidates, Steps

__all__ = ["Candidates", "Hypothesis", "SearchOptions", "Steps"]
