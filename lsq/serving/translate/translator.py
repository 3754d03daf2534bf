"""A trained model that translates text."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from lsq.config import require_choice
from lsq.serving.decode import Hypothesis, SearchOptions, search
from lsq.serving.decode.search import most_words
from lsq.serving.translate.batches import BatchLimit, batches
from lsq.serving.translate.device import place_of
from lsq.serving.translate.model import load
from lsq.serving.translate.splitting import pieces, sentences
from lsq.text.corpus import has_text

logger = logging.getLogger(__name__)

BATCH_TOKENS = 2048
"""Words of a batch's sources, with padding; what its hypotheses take is limited in proportion."""
SENTENCES = 10_000
"""A line with more is cut without regard to them: a line of full stops has half as many as it has
bytes."""
LONG_LINES = {
    "cut": "are cut and translated in parts",
    "skip": "are left empty",
    "copy": "are copied as they are",
    "refuse": "are refused",
}
"""What may become of lines that are too long for the model, in words."""
SHOWN = 60
"""Characters of a line in a message, at most."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float
    """Of its hypothesis; of a line that was cut, the mean of its parts' scores, weighted by their
    words, or their sum where scores are not normalised.
    """
    too_long: bool = False
    """Whether the line is too long for the model, so that it was cut, skipped or copied."""


class RefusedLine(ValueError):
    """A line that cannot be translated; `line` is its number in what was given, from 0, and
    `reason` says why."""

    def __init__(self, line: int, reason: str):
        super().__init__(f"line {line + 1}: {reason}")
        self.line, self.reason = line, reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A line, or a part of one that is too long as it is."""

    line: int
    words: Tensor
    """int64 [S]"""
    prefix: Tensor
    """int64 [P], what the translation begins with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A line as it is translated."""

    parts: list[Part]
    too_long: bool = False
    """Whether it is too long for the model."""
    instead: str = ""
    """Its translation where it has no parts."""


class Translator:
    """Translates text with a trained model, in any thread.

    Args:
        path: a run of `lsq train-text`, its output folder with one run, a file of `lsq export`, or
            a checkpoint.
        data: of a checkpoint: the folder of its dictionaries.
        sentencepiece_model: of a checkpoint: its subwords; without it, lines are words of its
            dictionaries.
        batch_tokens: words of a batch, with padding (see BatchLimit); a batch has one sentence at
            least.
        long_lines: what becomes of lines that are too long for the model. "cut": they are
            translated in parts, cut at the ends of their sentences, and where one is too long,
            between its words; "skip": their translations are empty; "copy": they are translations
            of themselves; "refuse": RefusedLine is raised.
        device: where it computes: "cpu"; "cuda", a GPU; "emulator", a GPU's kernels on the CPU, for
            tests.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged, or something else; batch_tokens is below 1; there is no such
            device or value of long_lines; or the device does not work, or not for this model.
    """

    _told_of_unknown = _told_of_nothing = False

    def __init__(
        self,
        path: str | PathLike,
        *,
        data: str | PathLike | None = None,
        sentencepiece_model: str | PathLike | None = None,
        batch_tokens: int = BATCH_TOKENS,
        long_lines: str = "cut",
        device: str = "cpu",
    ):
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
        require_choice("long_lines", long_lines, LONG_LINES)
        data, sentencepiece_model = (
            None if given is None else Path(given) for given in (data, sentencepiece_model)
        )
        self.model = load(Path(path), data, sentencepiece_model, place_of(device))
        self.batch_tokens, self.long_lines = batch_tokens, long_lines
        self._at_work, self._process = threading.Lock(), os.getpid()

    def __reduce__(self):
        """Refuse, as its engine does."""
        raise TypeError(
            "a Translator is neither copied nor pickled; make one in each process, from the same"
            " file"
        )

    @property
    def options(self) -> SearchOptions:
        """How it searches where nothing else is said: as the run translated its test set, or a
        training of fairseq's with --eval-bleu its validation set.
        """
        return self.model.options

    def translate(
        self,
        lines: Sequence[str],
        options: SearchOptions | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[list[Translation]]:
        """Translate lines of text.

        Args:
            options: how to search.
            prefixes: what the translation of each line begins with; "" where nothing is wanted.
            progress: called with the number of lines, or parts of lines, whenever some are done.

        Returns:
            For each line its translations, the best first, at most `options.nbest`. An empty line,
            which has no visible character or none that the model knows, has one, without words. A
            line that is skipped or copied has one, too.

        Raises:
            RefusedLine: a line or a prefix holds what is no text, a prefix is too long, or a line
                is, with long_lines="refuse".
            ValueError: lines or prefixes are no list of strings, or there are more or fewer
                prefixes than lines.
        """
        options = options or self.options
        sources = self.sources(lines, [""] * len(lines) if prefixes is None else prefixes)
        parts = [part for source in sources for part in source.parts]
        hypotheses: dict[int, list[Hypothesis]] = {}
        for batch in batches([len(part.words) for part in parts], self.limit(options)):
            hypotheses |= zip(
                batch, self.search([parts[number] for number in batch], options), strict=True
            )
            if progress is not None:
                progress(len(batch))
        return self.joined(sources, [hypotheses[number] for number in range(len(parts))], options)

    def limit(self, options: SearchOptions) -> BatchLimit:
        """What is translated together at most."""
        steps = self.model.steps
        return BatchLimit(
            tokens=self.batch_tokens,
            options=options,
            vocabulary=steps.words,
            positions=steps.longest,
        )

    def sources(self, lines: Sequence[str], prefixes: Sequence[str]) -> list[Source]:
        """All lines as they are translated.

        Raises:
            RefusedLine, ValueError: see `translate`.
        """
        for name, texts in (("lines", lines), ("prefixes", prefixes)):
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise ValueError(
                    f"{name} must be a list of strings, such as ['one line', 'another line']"
                )
        if len(prefixes) != len(lines):
            raise ValueError(
                f"there are {len(lines)} lines but {len(prefixes)} prefixes; give one for each line"
            )
        pairs = enumerate(zip(lines, prefixes, strict=True))
        return [self.source(number, line, prefix) for number, (line, prefix) in pairs]

    def source(self, number: int, line: str, prefix: str = "") -> Source:
        """A line as it is translated: not at all, as it is, or in parts.

        Raises:
            RefusedLine: the line, whose number this is, is too long, or holds what is no text.
        """
        for text in (line, prefix):
            _check(number, text)
        text = " ".join(line.split())
        subwords, longest = self.model.subwords, self.model.longest_source
        encoded = [subwords.source_words(text)]
        too_long = len(encoded[0]) > longest
        if subwords.source.says_nothing(encoded[0].tolist()):
            self._tell_of_nothing(number, text)
            return Source(parts=[])
        if too_long and self.long_lines == "refuse":
            raise RefusedLine(
                number,
                f"it has {len(encoded[0]) - 1} subwords, and the model takes {longest - 1} at most;"
                " shorten it, or let"
                ' it be cut (long_lines="cut", or --long-lines cut)',
            )
        if too_long and self.long_lines != "cut":
            return Source(
                parts=[], too_long=True, instead=text if self.long_lines == "copy" else ""
            )
        if too_long:
            encoded = [
                part for part in self._cut(text) if not subwords.source.says_nothing(part.tolist())
            ]
        beginnings = [
            self._beginning(number, prefix),
            *[subwords.target_words("")] * (len(encoded) - 1),
        ]
        parts = [
            Part(line=number, words=words, prefix=beginning)
            for words, beginning in zip(encoded, beginnings, strict=True)
        ]
        return Source(parts=parts, too_long=too_long)

    def _cut(self, text: str) -> Iterator[Tensor]:
        """The parts of a line that is too long, each with its end."""
        subwords, longest = self.model.subwords, self.model.longest_source - 1
        cut = sentences(text)
        for sentence in cut if len(cut) <= SENTENCES else [text]:
            words = subwords.source_words(sentence)
            for piece in pieces(words[:-1].tolist(), longest, subwords.begins_word):
                yield torch.tensor([*piece, subwords.source.end])

    def _tell_of_nothing(self, number: int, text: str) -> None:
        """Say once that a line with text has no words that the model knows."""
        if not self._told_of_nothing and has_text(text):
            self._told_of_nothing = True
            logger.warning(
                "line %d: %r has no character or word that the model knows; it is translated as an"
                " empty"
                " line (said once)",
                number + 1,
                text[:SHOWN],
            )

    def _beginning(self, number: int, prefix: str) -> Tensor:
        """The words of a prefix; those that the model does not know are told of, once."""
        symbols, text = self.model.symbols, " ".join(prefix.split()) if has_text(prefix) else ""
        words = self.model.subwords.target_words(text)
        if (words == symbols.padding).any():
            raise RefusedLine(
                number, "its prefix has the symbol of padding, which is no word; remove it"
            )
        if not self._told_of_unknown and (words == symbols.unknown).any():
            self._told_of_unknown = True
            logger.warning(
                "line %d: its prefix %r has characters or words that the model does not know; they"
                " are taken as its"
                " unknown word (said once)",
                number + 1,
                text[:SHOWN],
            )
        return words

    def search(
        self,
        parts: Sequence[Part],
        options: SearchOptions,
        before_step: Callable[[], object] | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each part, in one batch; what `before_step` raises ends the search (see
        `search`).

        Raises:
            RefusedLine: a prefix has more words than a hypothesis may have.
            ValueError: the options allow no hypothesis of a part.
            RuntimeError: the process was forked off the one that loaded the model, and would wait
                for its threads.
        """
        if os.getpid() != self._process and torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked off the one that loaded the model, whose threads are not"
                " here; call"
                " torch.set_num_threads(1) first, or start processes by 'spawn' and let each load"
                " the model"
            )
        words, prefixes = [part.words for part in parts], [part.prefix for part in parts]
        limit = most_words(options, max(map(len, words), default=0), self.model.steps.longest)
        for part in parts:
            if len(part.prefix) > limit:
                raise RefusedLine(
                    part.line,
                    f"its prefix has {len(part.prefix)} words or subwords, and a translation"
                    f" {limit} at most; shorten"
                    " it, or allow longer ones (max_len_b)",
                )
        with self._at_work, torch.inference_mode():
            return search(
                self.model.steps,
                words,
                options,
                prefixes,
                symbols=self.model.symbols,
                before_step=before_step,
            )

    def joined(
        self, sources: Sequence[Source], found: Iterable[list[Hypothesis]], options: SearchOptions
    ) -> list[list[Translation]]:
        """What `translate` returns, from the hypotheses of the parts of all lines, in their
        order."""
        hypotheses = iter(found)
        return [
            self._of_line(
                source, [next(hypotheses) for _ in source.parts], options.normalize_scores
            )
            for source in sources
        ]

    def _of_line(
        self, source: Source, parts: list[list[Hypothesis]], normalized: bool
    ) -> list[Translation]:
        """The translations of a line from those of its parts: the best of all parts, then the
        second best of all."""
        if not parts:
            return [Translation(text=source.instead, score=0.0, too_long=source.too_long)]
        found = []
        for chosen in zip(*parts, strict=False):
            text = " ".join(filter(None, (self.model.subwords.text(part.words) for part in chosen)))
            weights = [len(part.words) if normalized else 1 for part in chosen]
            total = sum(part.score * weight for part, weight in zip(chosen, weights, strict=True))
            score = total / sum(weights) if normalized else total
            found.append(Translation(text=text, score=score, too_long=source.too_long))
        return found


def _check(number: int, text: str) -> None:
    if "\0" in text:
        raise RefusedLine(number, "a NUL character is no text; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedLine(
            number, f"{text[error.start]!r} is half of a character; remove it"
        ) from None
