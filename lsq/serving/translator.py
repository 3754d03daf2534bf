"""Translation of lines of text, in batches, by models of `lsq export` or of a training."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lsq.config import require_choice
from lsq.run.backends import Backend, backend
from lsq.run.cuda import gpu_fault
from lsq.serving import model_file
from lsq.serving.engine import Engine
from lsq.serving.search import most_words, search
from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis, Steps, Symbols
from lsq.serving.subwords import Subwords, Words, pieces, processor_of, sentences
from lsq.text.corpus import has_text

logger = logging.getLogger(__name__)

DEVICES = {"cpu": "cpu", "cuda": "cuda", "emulator": "emulated"}
"""Device -> its backend."""
BATCH_TOKENS = 2048
SHORT = 256
"""Fewest words that a hypothesis counts as: many short ones together gain nothing."""
HYPOTHESIS_WORDS, PROBABILITIES = 64, 8192
SENTENCES = 10_000
"""A line with more sentences, such as a row of full stops, is cut without regard to them."""
LONG_LINES = {
    "cut": "are cut and translated in parts",
    "skip": "are left empty",
    "copy": "are copied as they are",
    "refuse": "are refused",
}
"""Treatment of lines that are too long for the model -> words about them in a message."""
SHOWN = 60
"""Most characters of a line in a message."""


def backend_of(device: str) -> Backend:
    """Return the backend of one of DEVICES, in float32; ValueError if it does not work here."""
    require_choice("device", device, DEVICES)
    fault = gpu_fault() if device == "cuda" else None
    if fault:
        raise ValueError(f"device cuda: {fault}")
    try:
        return backend(DEVICES[device], torch.float32)
    except RuntimeError as error:
        raise ValueError(f"device {device}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TranslationModel:
    """A model that is ready to translate; `stamp` is `stamp_of` its file when it was read."""

    file: Path
    stamp: tuple
    steps: Steps
    subwords: Subwords
    longest_source: int
    """Most words of a source, its end included."""
    options: SearchOptions
    """Options of the training's own translation, as far as known."""

    @property
    def symbols(self) -> Symbols:
        words = self.subwords.target
        return Symbols(start=words.end, padding=words.padding, end=words.end, unknown=words.unknown)

    def changed(self) -> bool:
        """Return whether the file was replaced, written to or removed since it was read."""
        try:
            return stamp_of(self.file) != self.stamp
        except OSError:
            return True


def longest_source(positions: int, trained_length: int | None) -> int:
    """Return the most words of a source with its end: as in training if known, or all that fit."""
    return min(positions, (trained_length or positions) + 1)


def stamp_of(file: Path) -> tuple:
    """Return values that change if a file is replaced or written to; OSError if it is gone."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_exported(path: Path, device: Backend | None = None) -> TranslationModel:
    """Read a file of `lsq export` for a backend; None: the CPU. FileNotFoundError or ValueError: it
    is missing, damaged, a language model, or another file."""
    stamp = stamp_of(path)
    exported = model_file.read(path)
    architecture = exported.model.architecture
    if exported.source is None or architecture.encoder is None:
        raise ValueError(f"{path} is a language model; it does not translate")
    end = architecture.eos
    special = {"beginning": architecture.bos, "padding": architecture.padding}
    special |= {"end": end, "unknown": architecture.unk}
    source, target = (
        Words(symbols=symbols, **special) for symbols in (exported.source, exported.target)
    )
    steps = Engine(exported.model, device)
    # a first step copies all weights: the file may change from now on
    steps.begin([torch.tensor([end])], rows=1, steps=1)
    steps.step(torch.tensor([end]), torch.tensor([0]), top=1)
    return TranslationModel(
        file=path,
        stamp=stamp,
        steps=steps,
        subwords=Subwords(source, target, exported.subwords and processor_of(exported.subwords)),
        longest_source=longest_source(architecture.encoder.max_positions, exported.trained_length),
        options=exported.search,
    )


@dataclass(frozen=True, kw_only=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float
    """Score of its hypothesis. A line that was cut has the mean of its parts' scores, weighted by
    their words, or their sum if scores are not normalised."""
    too_long: bool = False
    """Whether the line was too long for the model, and so cut, skipped or copied."""


class RefusedLine(ValueError):
    """A line that cannot be translated: its index, from 0, and the reason."""

    def __init__(self, line: int, reason: str):
        super().__init__(f"line {line + 1}: {reason}")
        self.line, self.reason = line, reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A line, or a part of one that is too long."""

    line: int
    words: Tensor
    """int64 [S]"""
    prefix: Tensor
    """int64 [P], words that the translation begins with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A line, ready to be translated."""

    parts: list[Part]
    too_long: bool = False
    instead: str = ""
    """Translation of a line without parts."""


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """Limit of a batch: at most `tokens` words of sources, with padding; HYPOTHESIS_WORDS times as
    many words of hypotheses, at the largest length that the options allow; and PROBABILITIES times
    as many words that may follow them. A hypothesis has at most `positions` words."""

    tokens: int
    options: SearchOptions
    vocabulary: int
    positions: int

    def holds(self, sentences: int, longest: int) -> bool:
        """Return whether `sentences` sources of at most `longest` words are within the limit."""
        options, rows = self.options, sentences * self.options.beam
        steps = max(SHORT, most_words(options, longest, self.positions) + 1)
        candidates = max(options.sampling_topk, 2 * options.beam)
        if options.all_words:
            candidates = self.vocabulary
        return (
            sentences * longest <= self.tokens
            and rows * steps <= HYPOTHESIS_WORDS * self.tokens
            and rows * candidates <= PROBABILITIES * self.tokens
        )


def batches(lengths: Sequence[int], limit: BatchLimit) -> Iterator[list[int]]:
    """Yield batches of indices, the longest first, within the limit or of one sentence."""
    batch: list[int] = []
    for sentence in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and not limit.holds(len(batch) + 1, lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(sentence)
    if batch:
        yield batch


def check_settings(batch_tokens: int, long_lines: str) -> None:
    """Raise ValueError if batch_tokens is below 1 or long_lines is unknown."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
    require_choice("long_lines", long_lines, LONG_LINES)


class TextTranslator:
    """Translates text with a model, in any thread. `lsq.Translator` is a subclass that loads its
    model.

    Args:
        model: the model, its vocabularies and limits.
        batch_tokens: most words of a batch's sources, with padding. Hypotheses are limited in
            proportion. A batch has at least one sentence.
        long_lines: treatment of lines that are too long for the model. "cut": they are cut at the
            ends of sentences, or between words if a sentence is too long, and translated in parts;
            "skip": their translations are empty; "copy": they are copied; "refuse": RefusedLine is
            raised.

    Raises:
        ValueError: batch_tokens is below 1, or long_lines is unknown.
    """

    def __init__(
        self, model: TranslationModel, *, batch_tokens: int = BATCH_TOKENS, long_lines: str = "cut"
    ):
        check_settings(batch_tokens, long_lines)
        self.model, self.batch_tokens, self.long_lines = model, batch_tokens, long_lines
        self._searching, self._process = threading.Lock(), os.getpid()
        self._said: set[str] = set()

    def __reduce__(self):
        raise TypeError(
            "a Translator is neither copied nor pickled; make one in each process, from the same"
            " file"
        )

    @property
    def options(self) -> SearchOptions:
        """Default options: those of the training's own translation."""
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
            options: of the search.
            prefixes: beginning of the translation of each line, "" for none.
            progress: called with the number of lines, or parts of lines, whenever some are done.

        Returns:
            For each line its translations, the best first, at most `options.nbest`. An empty line,
                without a visible character that the model knows, has one translation without words.
                A line that is skipped or copied has one.

        Raises:
            RefusedLine: a line or a prefix has characters that are no text, a prefix is too long,
                or, with long_lines="refuse", a line is too long.
            ValueError: lines or prefixes are no list of strings, or their numbers differ.
        """
        options = options or self.options
        prefixes = [""] * len(lines) if prefixes is None else prefixes
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
        sources = [self.source(number, line, prefix) for number, (line, prefix) in pairs]
        parts = [part for source in sources for part in source.parts]
        hypotheses: dict[int, list[Hypothesis]] = {}
        for batch in batches([len(part.words) for part in parts], self.limit(options)):
            results = self.search([parts[number] for number in batch], options)
            hypotheses |= zip(batch, results, strict=True)
            if progress is not None:
                progress(len(batch))
        return self.joined(sources, [hypotheses[number] for number in range(len(parts))], options)

    def limit(self, options: SearchOptions) -> BatchLimit:
        """Return the limit of what is translated together."""
        sizes = {"vocabulary": self.model.steps.words, "positions": self.model.steps.longest}
        return BatchLimit(tokens=self.batch_tokens, options=options, **sizes)

    def source(self, number: int, line: str, prefix: str = "") -> Source:
        """Prepare line `number`; RefusedLine if it is too long, or has what is no text."""
        for text in (line, prefix):
            if "\0" in text:
                raise RefusedLine(number, "a NUL character is no text; remove it")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RefusedLine(
                    number, f"{text[error.start]!r} is half of a character; remove it"
                ) from None
        text = " ".join(line.split())
        subwords, longest = self.model.subwords, self.model.longest_source
        encoded = [subwords.source_words(text)]
        too_long = len(encoded[0]) > longest
        if subwords.source.says_nothing(encoded[0].tolist()):
            if has_text(text):
                problem = (
                    "has no character or word that the model knows; it is translated as an empty"
                    " line"
                )
                self._warn_once(number, repr(text[:SHOWN]), problem)
            return Source(parts=[])
        if too_long and self.long_lines == "refuse":
            raise RefusedLine(
                number,
                f"it has {len(encoded[0]) - 1} subwords, and the model takes {longest - 1} at most;"
                ' shorten it, or let it be cut (long_lines="cut", or --long-lines cut)',
            )
        if too_long and self.long_lines != "cut":
            instead = text if self.long_lines == "copy" else ""
            return Source(parts=[], too_long=True, instead=instead)
        if too_long:
            cut = self._cut(text)
            encoded = [part for part in cut if not subwords.source.says_nothing(part.tolist())]
        no_prefix = subwords.target_words("")
        beginnings = [self._beginning(number, prefix), *[no_prefix] * (len(encoded) - 1)]
        parts = [
            Part(line=number, words=words, prefix=beginning)
            for words, beginning in zip(encoded, beginnings, strict=True)
        ]
        return Source(parts=parts, too_long=too_long)

    def _warn_once(self, number: int, text: str, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("line %d: %s %s (said once)", number + 1, text, problem)

    def _cut(self, text: str) -> Iterator[Tensor]:
        """Yield the parts of a line that is too long, each with its end."""
        subwords, longest = self.model.subwords, self.model.longest_source - 1
        cut = sentences(text)
        for sentence in cut if len(cut) <= SENTENCES else [text]:
            words = subwords.source_words(sentence)
            for piece in pieces(words[:-1].tolist(), longest, subwords.begins_word):
                yield torch.tensor([*piece, subwords.source.end])

    def _beginning(self, number: int, prefix: str) -> Tensor:
        symbols, text = self.model.symbols, " ".join(prefix.split()) if has_text(prefix) else ""
        words = self.model.subwords.target_words(text)
        if (words == symbols.padding).any():
            raise RefusedLine(
                number, "its prefix has the symbol of padding, which is no word; remove it"
            )
        if (words == symbols.unknown).any():
            problem = (
                "has characters or words that the model does not know; they are taken as its"
                " unknown word"
            )
            self._warn_once(number, f"its prefix {text[:SHOWN]!r}", problem)
        return words

    def search(
        self,
        parts: Sequence[Part],
        options: SearchOptions,
        before_step: Callable[[], object] | None = None,
    ) -> list[list[Hypothesis]]:
        """Find the hypotheses of all parts, in one batch; an error of `before_step` ends the
        search.

        Raises:
            RefusedLine: a prefix is too long.
            ValueError: the options allow no hypothesis.
            RuntimeError: this process was forked off the process that loaded the model.
        """
        if os.getpid() != self._process and torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked off the one that loaded the model, whose threads are not"
                " here; call torch.set_num_threads(1) first, or start processes by 'spawn' and let"
                " each load the model"
            )
        words, prefixes = [part.words for part in parts], [part.prefix for part in parts]
        limit = most_words(options, max(map(len, words), default=0), self.model.steps.longest)
        for part in parts:
            if len(part.prefix) > limit:
                raise RefusedLine(
                    part.line,
                    f"its prefix has {len(part.prefix)} words or subwords, and a translation"
                    f" {limit} at most; shorten it, or allow longer ones (max_len_b)",
                )
        how = {"symbols": self.model.symbols, "before_step": before_step}
        with self._searching, torch.inference_mode():
            return search(self.model.steps, words, options, prefixes, **how)

    def joined(
        self, sources: Sequence[Source], results: Iterable[list[Hypothesis]], options: SearchOptions
    ) -> list[list[Translation]]:
        """Join the best hypotheses of all parts of a line, then the second best, and so on."""
        hypotheses, lines = iter(results), []
        for source in sources:
            translations, parts = [], [next(hypotheses) for _ in source.parts]
            for chosen in zip(*parts, strict=False):
                texts = [self.model.subwords.text(part.words) for part in chosen]
                weights = [len(part.words) if options.normalize_scores else 1 for part in chosen]
                score = sum(
                    part.score * weight for part, weight in zip(chosen, weights, strict=True)
                )
                if options.normalize_scores:
                    score /= sum(weights)
                text = " ".join(filter(None, texts))
                translations.append(Translation(text=text, score=score, too_long=source.too_long))
            without = Translation(text=source.instead, score=0.0, too_long=source.too_long)
            lines.append(translations if parts else [without])
        return lines
