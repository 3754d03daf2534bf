"""Translation of lines of text: empty, long and unknown ones included, in batches of any size."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsq.config import require_choice
from lsq.serving.search import most_words, search
from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis
from lsq.serving.subwords import pieces, sentences
from lsq.serving.translation_model import TranslationModel
from lsq.text.corpus import has_text

logger = logging.getLogger(__name__)

BATCH_TOKENS = 2048
"""Words of a batch's sources, with padding; hypotheses are limited in proportion."""
SHORT = 256
"""Hypotheses count as so many words at least: many short ones together gain nothing."""
HYPOTHESIS_WORDS, PROBABILITIES = 64, 8192
"""Words of hypotheses, and probabilities of a step, for each word of the sources."""
SENTENCES = 10_000
"""A line with more sentences is cut without regard to them: a line of full stops has half as many
as it has bytes."""
LONG_LINES = {
    "cut": "are cut and translated in parts",
    "skip": "are left empty",
    "copy": "are copied as they are",
    "refuse": "are refused",
}
"""Treatments of lines that are too long for the model -> what a message says of such lines."""
SHOWN = 60
"""Characters of a line in a message, at most."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float
    """Of its hypothesis; of a line that was cut, the mean of its parts' scores, weighted by their
    words, or their sum if scores are not normalised."""
    too_long: bool = False
    """Whether the line is too long for the model, so that it was cut, skipped or copied."""


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
    """Whether it is too long for the model."""
    instead: str = ""
    """Its translation if it has no parts."""


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """How much is translated together.

    Of S sentences with `beam` hypotheses each, the sources have at most `tokens` words, with
    padding; the hypotheses, at the largest length that the options allow, HYPOTHESIS_WORDS times as
    many; and the words that may follow them, which are the whole vocabulary if words are drawn from
    it, PROBABILITIES times as many.
    """

    tokens: int
    options: SearchOptions
    vocabulary: int
    """Words of the target."""
    positions: int
    """Words of a hypothesis, its end included, at most."""

    def holds(self, sentences: int, longest: int) -> bool:
        """Whether so many sentences, the longest of so many words, are within the limit."""
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
    """Yield batches of numbers of sentences, the longest first, each within the limit or with one
    sentence."""
    batch: list[int] = []
    for sentence in sorted(range(len(lengths)), key=lambda sentence: -lengths[sentence]):
        if batch and not limit.holds(len(batch) + 1, lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(sentence)
    if batch:
        yield batch


def check_settings(batch_tokens: int, long_lines: str) -> None:
    """Check what `Translator` takes beside a model; ValueError if a value is not allowed."""
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
    require_choice("long_lines", long_lines, LONG_LINES)


class TextTranslator:
    """Translates text with a model, in any thread. `lsq.Translator` is one that reads its model.

    Args:
        model: the model, its vocabularies and limits.
        batch_tokens: words of a batch, with padding (see BatchLimit); a batch has one sentence at
            least.
        long_lines: treatment of lines that are too long for the model. "cut": they are translated
            in parts, cut at the ends of their sentences, and if a sentence is too long, between its
            words; "skip": their translations are empty; "copy": their translations are the lines
            themselves; "refuse": RefusedLine is raised.

    Raises:
        ValueError: batch_tokens is below 1, or there is no such value of long_lines.
    """

    _warned_of_unknown = _warned_of_nothing = False

    def __init__(
        self, model: TranslationModel, *, batch_tokens: int = BATCH_TOKENS, long_lines: str = "cut"
    ):
        check_settings(batch_tokens, long_lines)
        self.model, self.batch_tokens, self.long_lines = model, batch_tokens, long_lines
        self._searching, self._process = threading.Lock(), os.getpid()

    def __reduce__(self):
        """Refuse, as its engine does."""
        raise TypeError(
            "a Translator is neither copied nor pickled; make one in each process, from the same"
            " file"
        )

    @property
    def options(self) -> SearchOptions:
        """Default options of the search: those with which the run translated its test set, or a
        training of fairseq's with --eval-bleu its validation set."""
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
            which has no visible character or none that the model knows, has one, without words. A
            line that is skipped or copied has one, too.

        Raises:
            RefusedLine: a line or a prefix holds what is no text, a prefix is too long, or a line
                is, with long_lines="refuse".
            ValueError: lines or prefixes are no list of strings, or their numbers differ.
        """
        options = options or self.options
        sources = self.sources(lines, [""] * len(lines) if prefixes is None else prefixes)
        parts = [part for source in sources for part in source.parts]
        hypotheses: dict[int, list[Hypothesis]] = {}
        for batch in batches([len(part.words) for part in parts], self.limit(options)):
            results = self.search([parts[number] for number in batch], options)
            hypotheses |= zip(batch, results, strict=True)
            if progress is not None:
                progress(len(batch))
        return self.joined(sources, [hypotheses[number] for number in range(len(parts))], options)

    def limit(self, options: SearchOptions) -> BatchLimit:
        """Return how much is translated together."""
        steps = self.model.steps
        return BatchLimit(
            tokens=self.batch_tokens,
            options=options,
            vocabulary=steps.words,
            positions=steps.longest,
        )

    def sources(self, lines: Sequence[str], prefixes: Sequence[str]) -> list[Source]:
        """Prepare all lines; raises as `translate` does."""
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
        """Prepare line `number`; RefusedLine if it is too long, or holds what is no text."""
        for text in (line, prefix):
            _check_text(number, text)
        text = " ".join(line.split())
        subwords, longest = self.model.subwords, self.model.longest_source
        encoded = [subwords.source_words(text)]
        too_long = len(encoded[0]) > longest
        if subwords.source.says_nothing(encoded[0].tolist()):
            self._warn_of_nothing(number, text)
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

    def _cut(self, text: str) -> Iterator[Tensor]:
        """Yield the parts of a line that is too long, each with its end."""
        subwords, longest = self.model.subwords, self.model.longest_source - 1
        cut = sentences(text)
        for sentence in cut if len(cut) <= SENTENCES else [text]:
            words = subwords.source_words(sentence)
            for piece in pieces(words[:-1].tolist(), longest, subwords.begins_word):
                yield torch.tensor([*piece, subwords.source.end])

    def _warn_of_nothing(self, number: int, text: str) -> None:
        if not self._warned_of_nothing and has_text(text):
            self._warned_of_nothing = True
            logger.warning(
                "line %d: %r has no character or word that the model knows; it is translated as an"
                " empty line (said once)",
                number + 1,
                text[:SHOWN],
            )

    def _beginning(self, number: int, prefix: str) -> Tensor:
        """Return the words of a prefix; warn once of unknown ones."""
        symbols, text = self.model.symbols, " ".join(prefix.split()) if has_text(prefix) else ""
        words = self.model.subwords.target_words(text)
        if (words == symbols.padding).any():
            raise RefusedLine(
                number, "its prefix has the symbol of padding, which is no word; remove it"
            )
        if not self._warned_of_unknown and (words == symbols.unknown).any():
            self._warned_of_unknown = True
            logger.warning(
                "line %d: its prefix %r has characters or words that the model does not know; they"
                " are taken as its unknown word (said once)",
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
        """Find the hypotheses of each part, in one batch; an exception of `before_step` ends it.

        Raises:
            RefusedLine: a prefix has more words than a hypothesis may have.
            ValueError: the options allow no hypothesis of a part.
            RuntimeError: the process was forked off the one that loaded the model, and would wait
                for its threads.
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
        with self._searching, torch.inference_mode():
            return search(
                self.model.steps,
                words,
                options,
                prefixes,
                symbols=self.model.symbols,
                before_step=before_step,
            )

    def joined(
        self, sources: Sequence[Source], results: Iterable[list[Hypothesis]], options: SearchOptions
    ) -> list[list[Translation]]:
        """Return what `translate` returns, from the hypotheses of the parts of all lines."""
        hypotheses = iter(results)
        return [
            self._of_line(
                source, [next(hypotheses) for _ in source.parts], options.normalize_scores
            )
            for source in sources
        ]

    def _of_line(
        self, source: Source, parts: list[list[Hypothesis]], normalized: bool
    ) -> list[Translation]:
        """Join the best hypotheses of all parts, then the second best of all, and so on."""
        if not parts:
            return [Translation(text=source.instead, score=0.0, too_long=source.too_long)]
        translations = []
        for chosen in zip(*parts, strict=False):
            text = " ".join(filter(None, (self.model.subwords.text(part.words) for part in chosen)))
            weights = [len(part.words) if normalized else 1 for part in chosen]
            total = sum(part.score * weight for part, weight in zip(chosen, weights, strict=True))
            score = total / sum(weights) if normalized else total
            translations.append(Translation(text=text, score=score, too_long=source.too_long))
        return translations


def _check_text(number: int, text: str) -> None:
    if "\0" in text:
        raise RefusedLine(number, "a NUL character is no text; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedLine(
            number, f"{text[error.start]!r} is half of a character; remove it"
        ) from None
