"""PyTorch modules whose projections run in int8, imported when they are first used."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.layers.embedding import Embedding
    from lsq.layers.layer_inputs import LayerInputs
    from lsq.layers.linear import QuantizedLinear
    from lsq.layers.module import ProgramModule
    from lsq.layers.packing import Packing, pack_time_major, unpack_time_major
    from lsq.layers.stack import TransformerLanguageModel
    from lsq.layers.transformer import (
        FeedForward,
        MultiheadAttention,
        TransformerDecoderLayer,
        TransformerEncoderLayer,
    )
    from lsq.layers.vocabulary import VocabularyProjection

__all__ = [
    "Embedding",
    "FeedForward",
    "LayerInputs",
    "MultiheadAttention",
    "Packing",
    "ProgramModule",
    "QuantizedLinear",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "TransformerLanguageModel",
    "VocabularyProjection",
    "pack_time_major",
    "unpack_time_major",
]
_FILES = dict.fromkeys(__all__, "transformer") | {
    "Embedding": "embedding",
    "LayerInputs": "layer_inputs",
    "Packing": "packing",
    "ProgramModule": "module",
    "QuantizedLinear": "linear",
    "TransformerLanguageModel": "stack",
    "VocabularyProjection": "vocabulary",
    "pack_time_major": "packing",
    "unpack_time_major": "packing",
}
__getattr__ = lazily(__name__, _FILES)
