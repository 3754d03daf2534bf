"""PyTorch modules whose projections run in int8, imported when they are first used."""

from typing import TYPE_CHECKING

from lsq.extras import lazily

if TYPE_CHECKING:
    from lsq.layers.attention import MultiheadAttention
    from lsq.layers.decoder_layer import TransformerDecoderLayer
    from lsq.layers.embedding import Embedding
    from lsq.layers.encoder_layer import TransformerEncoderLayer
    from lsq.layers.feed_forward import FeedForward
    from lsq.layers.language_model import TransformerLanguageModel
    from lsq.layers.linear import QuantizedLinear
    from lsq.layers.module import ProgramModule
    from lsq.layers.packing import Packing, pack_time_major, unpack_time_major
    from lsq.layers.vocabulary import VocabularyProjection

_FILES = {
    "Embedding": "embedding",
    "FeedForward": "feed_forward",
    "MultiheadAttention": "attention",
    "Packing": "packing",
    "ProgramModule": "module",
    "QuantizedLinear": "linear",
    "TransformerDecoderLayer": "decoder_layer",
    "TransformerEncoderLayer": "encoder_layer",
    "TransformerLanguageModel": "language_model",
    "VocabularyProjection": "vocabulary",
    "pack_time_major": "packing",
    "unpack_time_major": "packing",
}
__all__ = [
    "Embedding",
    "FeedForward",
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
__getattr__ = lazily(__name__, _FILES)
