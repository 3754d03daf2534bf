"""Translation with a trained model: search, int8 engine, translator, HTTP service, export.

`search` asks `Steps` of a model which words may follow. `Engine` implements `Steps` in int8, on a
`DecodingModel`: `decoding_model` makes it from a trained module, `model_file` keeps it in a file.
Nothing here imports fairseq.
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
