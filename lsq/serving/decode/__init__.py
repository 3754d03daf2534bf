"""Decoding: what a search asks of a model, the search, and the engine that answers in int8.

Nothing here needs fairseq.

R hypotheses that are still open, "rows", of all sentences of a batch; V words.
"""

from lsq.serving.decode.hypothesis import Hypothesis
from lsq.serving.decode.options import SearchOptions
from lsq.serving.decode.search import search
from lsq.serving.decode.steps import Candidates, Steps
from lsq.serving.decode.symbols import Symbols

__all__ = ["Candidates", "Hypothesis", "SearchOptions", "Steps", "Symbols", "search"]
