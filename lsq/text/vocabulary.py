"""A vocabulary of subwords shared by both languages."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from lsq import extras
from lsq.config import DIMENSION_MULTIPLE
from lsq.text.corpus import Corpus

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from sentencepiece import SentencePieceProcessor

MODEL, PIECES = "sentencepiece.model", "sentencepiece.vocab"
FEWEST, MOST = 5, 2**24
"""Fewest and most subwords of a vocabulary; the first four are special."""
LEAST_COVERAGE = 0.98
PROBLEMS = {
    r"value <= (\d+)": "--vocabulary-size {} is too large for this text; use at most {}",
    r"required_chars\. \d+ vs (\d+)": "--vocabulary-size {} is too small for the characters of this"
    " text; use at least {}, or a lower --character-coverage",
    r"sentences_.empty\(\)": "every line of this text is longer than 4192 bytes, or there is none;"
    " split it into sentences",
    "all_chars_count": "the text has no characters to learn from, only white space; check that it"
    " is the right file",
}
"""Pattern of sentencepiece's message -> message to the user."""


def learn_vocabulary(corpus: Corpus, folder: Path, size: int, coverage: float) -> None:
    """Learn a byte-pair encoding of both sides and write it; ValueError if that is impossible."""
    if not FEWEST <= size <= MOST:
        raise ValueError(f"--vocabulary-size is {size}; it must be from {FEWEST} to {MOST}")
    if not LEAST_COVERAGE <= coverage <= 1:
        raise ValueError(
            f"--character-coverage is {coverage}; it must be from {LEAST_COVERAGE} to 1"
        )
    extras.require("a vocabulary", "text")
    from sentencepiece import SentencePieceTrainer

    sentences = (sentence for side in (corpus.source, corpus.target) for sentence in side)
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_prefix=str(folder / MODEL.removesuffix(".model")),
            model_type="bpe",
            vocab_size=size,
            character_coverage=coverage,
            pad_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        for pattern, text in PROBLEMS.items():
            if found := re.search(pattern, str(error)):
                raise ValueError(text.format(size, *found.groups())) from None
        raise ValueError(
            f"no vocabulary of {size} pieces could be learnt from this text: {error}"
        ) from None


def load_vocabulary(folder: Path) -> "SentencePieceProcessor":
    extras.require("a vocabulary", "text")
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(folder / MODEL))


def dictionary_of(vocabulary: "SentencePieceProcessor") -> "tuple[Dictionary, numpy.ndarray]":
    """Return fairseq's padded dictionary of the pieces, and each piece's index, int32 [pieces]."""
    from fairseq.data import Dictionary  # takes seconds

    dictionary = Dictionary()
    special = {
        vocabulary.unk_id(): dictionary.unk(),
        vocabulary.bos_id(): dictionary.bos(),
        vocabulary.eos_id(): dictionary.eos(),
        vocabulary.pad_id(): dictionary.pad(),
    }
    index = numpy.empty(vocabulary.get_piece_size(), dtype=numpy.int32)
    for piece in range(len(index)):
        known = special.get(piece)
        index[piece] = (
            dictionary.add_symbol(vocabulary.id_to_piece(piece)) if known is None else known
        )
    dictionary.pad_to_multiple_(DIMENSION_MULTIPLE)
    return dictionary, index
