"""Conversion of text to a model's words and back, and cuts of text that is too long.

S words of a source, T words of a target.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsq import extras
from lsq.text.corpus import has_text

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"
"""sentencepiece's sign for a space (Kudo and Richardson 2018)."""
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*")
"""End of a sentence: full stops or the like, closing quotes and brackets, and a space except in
scripts without spaces. It matches only from the first full stop of a row, else a million take
hours."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """A vocabulary: a word's number is its index in `symbols`."""

    symbols: Sequence[str]
    beginning: int
    padding: int
    end: int
    unknown: int

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    @cached_property
    def _silent(self) -> frozenset[int]:
        texts = (symbol.replace(SPACE, " ") for symbol in self.symbols)
        blank = (number for number, text in enumerate(texts) if not has_text(text))
        return frozenset((self.beginning, self.end, self.unknown, *blank))

    def says_nothing(self, words: Iterable[int]) -> bool:
        """Return whether a sentence has no known word with a visible character."""
        return all(word in self._silent for word in words)


class Subwords:
    """Converts text to words of two vocabularies and back, by sentencepiece's model. Without it,
    texts are words with spaces between them."""

    def __init__(self, source: Words, target: Words, processor: "SentencePieceProcessor | None"):
        self.source, self.target, self.processor = source, target, processor

    @cached_property
    def _words_of_pieces(self) -> dict[int, list[int]]:
        """id() of a vocabulary -> its word for each of sentencepiece's pieces."""
        pieces = [self.processor.id_to_piece(piece) for piece in range(len(self.processor))]
        return {
            id(words): [words.numbers.get(piece, words.unknown) for piece in pieces]
            for words in (self.source, self.target)
        }

    def source_words(self, text: str) -> Tensor:
        """Return the words of a source and its end, int64 [S]."""
        return torch.tensor([*self._encode(text, self.source), self.source.end])

    def target_words(self, text: str) -> Tensor:
        """Return the words that a translation begins with, int64 [T]."""
        return torch.tensor(self._encode(text, self.target), dtype=torch.int64)

    def begins_word(self, word: int) -> bool:
        return self.processor is None or self.source.symbols[word].startswith(SPACE)

    def _encode(self, text: str, words: Words) -> list[int]:
        if self.processor is None:
            return [words.numbers.get(word, words.unknown) for word in text.split()]
        known = self._words_of_pieces[id(words)]
        return [known[piece] for piece in self.processor.encode(text, out_type=int)]

    def text(self, words: Tensor) -> str:
        """Return the text of a target int64 [T], without beginning and end of a sentence."""
        left_out = (self.target.beginning, self.target.end)
        symbols = [self.target.symbols[word] for word in words.tolist() if word not in left_out]
        if self.processor is None:
            return " ".join(symbols)
        return "".join(symbols).replace(" ", "").replace(SPACE, " ").strip()


def processor_of(model: Path | bytes) -> "SentencePieceProcessor":
    """Load sentencepiece's model from its file or content; ValueError if it is damaged."""
    extras.require("a vocabulary", "text")
    from sentencepiece import SentencePieceProcessor

    content = model if isinstance(model, bytes) else model.read_bytes()
    try:
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ValueError(
            f"{'the model' if isinstance(model, bytes) else model} is damaged or no model of"
            f" sentencepiece's ({error}); give vocabulary/sentencepiece.model of the text that the"
            " model was trained on"
        ) from None


def sentences(line: str) -> list[str]:
    """Split a line into sentences without the spaces around them. Abbreviations count as ends, too:
    only lines that are too long are split."""
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(line))]
    parts = (
        line[start:end].strip() for start, end in zip(starts, [*starts[1:], len(line)], strict=True)
    )
    return [sentence for sentence in parts if sentence]


def pieces(
    words: Sequence[int], longest: int, begins: Callable[[int], bool]
) -> Iterator[Sequence[int]]:
    """Yield pieces of a sentence, of similar length and at most `longest` subwords. Cuts are before
    subwords that begin a word of the text, as `begins` says, if there are any."""
    start = 0
    while (left := len(words) - start) > longest:
        end = start + math.ceil(left / math.ceil(left / longest))
        end = next((index for index in range(end, start, -1) if begins(words[index])), end)
        yield words[start:end]
        start = end
    yield words[start:]
