"""Text to the words that a model knows, and back. S words of a source, T words of a target."""

from collections.abc import Iterable, Sequence
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
"""What sentencepiece writes for a space (Kudo and Richardson 2018)."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """A vocabulary: a word's number is its place in `symbols`."""

    symbols: Sequence[str]
    beginning: int
    end: int
    unknown: int

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Symbol -> number."""
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    @cached_property
    def _silent(self) -> frozenset[int]:
        symbols = enumerate(self.symbols)
        blank = (number for number, one in symbols if not has_text(one.replace(SPACE, " ")))
        return frozenset((self.beginning, self.end, self.unknown, *blank))

    def says_nothing(self, words: Iterable[int]) -> bool:
        """Whether a sentence is an empty line: no word of it is known and has a visible
        character."""
        return all(word in self._silent for word in words)


class Subwords:
    """Text to words and back.

    Args:
        source, target: the vocabularies of a model.
        processor: sentencepiece's model; None where texts are words of the vocabularies with spaces
            between them.
    """

    def __init__(self, source: Words, target: Words, processor: "SentencePieceProcessor | None"):
        self.source, self.target, self.processor = source, target, processor
        self._pieces = (
            []
            if processor is None
            else [processor.id_to_piece(piece) for piece in range(len(processor))]
        )

    @cached_property
    def _of_source(self) -> list[int]:
        return self._known(self.source)

    @cached_property
    def _of_target(self) -> list[int]:
        return self._known(self.target)

    def _known(self, words: Words) -> list[int]:
        """The word that each of sentencepiece's pieces is."""
        return [words.numbers.get(piece, words.unknown) for piece in self._pieces]

    def source_words(self, text: str) -> Tensor:
        """int64 [S]: the words of a source and the end of a sentence."""
        return torch.tensor([*self._encode(text, self.source), self.source.end])

    def begins_word(self, word: int) -> bool:
        """Whether a word of the source begins one of the text, of which it may be a part."""
        return self.processor is None or self.source.symbols[word].startswith(SPACE)

    def target_words(self, text: str) -> Tensor:
        """int64 [T]: the words that a translation begins with."""
        return torch.tensor(self._encode(text, self.target), dtype=torch.int64)

    def _encode(self, text: str, words: Words) -> list[int]:
        if self.processor is None:
            return [words.numbers.get(word, words.unknown) for word in text.split()]
        known = self._of_source if words is self.source else self._of_target
        return [known[piece] for piece in self.processor.encode(text, out_type=int)]

    def text(self, words: Tensor) -> str:
        """The text of a target int64 [T]; what begins or ends a sentence is left out."""
        left_out = (self.target.beginning, self.target.end)
        symbols = [self.target.symbols[word] for word in words.tolist() if word not in left_out]
        if self.processor is None:
            return " ".join(symbols)
        return "".join(symbols).replace(" ", "").replace(SPACE, " ").strip()


def processor_of(model: Path | bytes) -> "SentencePieceProcessor":
    """sentencepiece's model from its file or from the file's content.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or another file.
    """
    extras.require("a vocabulary", "text")
    from sentencepiece import SentencePieceProcessor

    content = model if isinstance(model, bytes) else model.read_bytes()
    try:
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ValueError(
            f"{'the model' if isinstance(model, bytes) else model} is damaged or no model of"
            f" sentencepiece's ({error});"
            " give vocabulary/sentencepiece.model of the text that the model was trained on"
        ) from None
