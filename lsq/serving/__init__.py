"""Uses of a trained model: search, int8 engine, translator, HTTP service, export. Nothing here
imports fairseq.

`search` asks `Steps` of a model which words may follow; `Engine` implements them in int8, on a
`DecodingModel`, which `decoding_model` makes of a trained module and `model_file` keeps in a file.
"""

from lsq.serving.decoding_model import DecodingModel
from lsq.serving.engine import Engine
from lsq.serving.search import search
from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Candidates, Hypothesis, Steps, Symbols
from lsq.serving.translator import RefusedLine, Translation

__all__ = [
    "Candidates",
    "DecodingModel",
    "Engine",
    "Hypothesis",
    "RefusedLine",
    "SearchOptions",
    "Steps",
    "Symbols",
    "Translation",
    "search",
]
