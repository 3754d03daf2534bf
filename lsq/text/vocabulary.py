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
"""Subwords that can be asked for: the first four are special."""
LEAST_COVERAGE = 0.98
LONGEST = 4192
"""Bytes of a line; sentencepiece leaves longer ones out."""


def learn_vocabulary(corpus: Corpus, folder: Path, size: int, coverage: float) -> None:
    """Learn a joint byte-pair encoding of both sides, and write folder/sentencepiece.model and
    .vocab; ValueError if size or coverage is out of its range, or does not fit the text."""
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
        raise ValueError(_vocabulary_problem(size, str(error))) from None


def _vocabulary_problem(size: int, message: str) -> str:
    if found := re.search(r"value <= (\d+)", message):
        return f"--vocabulary-size {size} is too large for this text; use at most {found[1]}"
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocabulary-size {size} is too small for the characters of this text; use at least"
            f" {found[1]}, or a lower --character-coverage"
        )
    if "sentences_.empty()" in message:
        return (
            f"every line of this text is longer than {LONGEST} bytes, or there is none; split it"
            " into sentences"
        )
    if "all_chars_count" in message:
        return (
            "the text has no characters to learn from, only white space; check that it is the right"
            " file"
        )
    return f"no vocabulary of {size} pieces could be learnt from this text: {message}"


def load_vocabulary(folder: Path) -> "SentencePieceProcessor":
    """Load the vocabulary that `learn_vocabulary` wrote into this folder."""
    extras.require("a vocabulary", "text")
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(folder / MODEL))


def dictionary_of(vocabulary: "SentencePieceProcessor") -> "tuple[Dictionary, numpy.ndarray]":
    """Make fairseq's dictionary of the pieces, padded to the width that int8 products take.

    Returns:
        (dictionary, its index of every piece: int32 [pieces])
    """
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
