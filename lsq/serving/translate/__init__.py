"""From text to its translations: a trained model with its vocabularies behind one class,
`Translator`.

fairseq is imported only for what it has written: a model of `lsq export` needs none of it.
"""

from lsq.serving.translate.translator import RefusedLine, Translation, Translator

__all__ = ["RefusedLine", "Translation", "Translator"]
