"""Decoding: what a search asks of a model, the search, and the engine that answers in int8.

Nothing here needs fairseq.

R hypotheses that are still open, "rows", of all sentences of a batch; V words.
"""

from lsq.decode.hypothesis import Hypothesis
from lsq.decode.options import SearchOptions
from lsq.decode.search import search
from lsq.decode.steps import Candidates, Steps
from lsq.decode.symbols import Symbols

__all__ = ["Candidates", "Hypothesis", "SearchOptions", "Steps", "Symbols", "search"]
