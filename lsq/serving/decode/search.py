"""The search: follows the most probable hypotheses of many sentences at once.

It finds what fairseq's generator finds on the same model, scores included. S sentences that are
open, B rows of each (one at the first step, then `beam`), N continuations of a sentence, T words of
a row so far.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lsq.serving.decode.continuations import Continuations
from lsq.serving.decode.groups import GroupSelection
from lsq.serving.decode.hypothesis import Hypothesis
from lsq.serving.decode.options import SearchOptions
from lsq.serving.decode.sampling import SamplingSelection
from lsq.serving.decode.selection import BeamSelection, Chosen, Selection
from lsq.serving.decode.steps import Steps
from lsq.serving.decode.symbols import Symbols

SYMBOLS = Symbols()


@torch.no_grad()
def search(
    steps: Steps,
    sources: Sequence[Tensor],
    options: SearchOptions,
    prefixes: Sequence[Tensor | None] | None = None,
    *,
    symbols: Symbols = SYMBOLS,
    generator: torch.Generator | None = None,
    before_step: Callable[[], object] | None = None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, best first, at most `options.nbest`.

    Args:
        steps: a model at work.
        sources: sentences int64 [S] that end with the end of a sentence.
        prefixes: words int64 [P] that the hypotheses of each sentence begin with, None for none;
            the limits on length hold for them, too.
        symbols: special words of the vocabulary.
        generator: what sampling draws from; a new one of `options.seed` unless it is given.
        before_step: called before each step; what it raises ends the search, and `steps` is free
            for another.

    Raises:
        ValueError: no hypothesis can be as long as the options want, prefixes or groups do not fit,
            or no hypothesis of a sentence has a probability above 0.
    """
    if not sources:
        return []
    limit = length_limit(steps, sources, options)
    beam = min(options.beam, steps.words - 1)  # padding is never chosen
    forced = forced_words(steps, len(sources), prefixes, symbols, sources[0].device)
    generator = generator or torch.Generator(sources[0].device).manual_seed(options.seed)
    selection = selection_of(options, beam, steps.words, generator)
    continuations = Continuations(steps, options, symbols, limit, selection.needed, forced)
    steps.begin(sources, rows=len(sources) * beam, steps=limit + 1)
    found = _Search(continuations, selection, options, symbols, limit, beam, sources).run(
        before_step
    )
    for number, sentence in enumerate(found):
        if not sentence or any(math.isnan(hypothesis.score) for hypothesis in sentence):
            raise ValueError(
                f"sentence {number} of the batch has no hypothesis with a probability above 0: the"
                " options or its"
                " prefix forbid every word, or the model computes NaN"
            )
    return [
        sorted(sentence, key=lambda hypothesis: -hypothesis.score)[: options.nbest]
        for sentence in found
    ]


def selection_of(
    options: SearchOptions, beam: int, vocabulary: int, generator: torch.Generator
) -> Selection:
    """How these options choose among `vocabulary` words; see `GroupSelection` for what it
    raises."""
    if options.sampling:
        return SamplingSelection(options, beam, vocabulary, generator)
    if options.diverse_beam_groups != -1:
        return GroupSelection(options, beam, vocabulary)
    return BeamSelection(beam, vocabulary)


def length_limit(steps: Steps, sources: Sequence[Tensor], options: SearchOptions) -> int:
    """The words before its end that a hypothesis has at most.

    Raises:
        ValueError: that is less than the options want.
    """
    longest = max(len(source) for source in sources)
    limit = most_words(options, longest, steps.longest)
    if options.min_len > limit:
        raise ValueError(
            f"min_len is {options.min_len}, but a hypothesis may have {limit} words at most"
            " (max_len_a"
            f" {options.max_len_a}, max_len_b {options.max_len_b}, {longest} words in the longest"
            " source,"
            f" {steps.longest} positions in the model)"
        )
    return limit


def most_words(options: SearchOptions, longest: int, positions: int) -> int:
    """The words before its end that a hypothesis may have in a model of so many positions.

    Args:
        longest: words of the longest source of the batch.
    """
    # no float holds every whole number
    wanted = options.max_len_a * longest + min(options.max_len_b, positions)
    return int(min(wanted, positions - 1))


def forced_words(
    steps: Steps,
    count: int,
    prefixes: Sequence[Tensor | None] | None,
    symbols: Symbols,
    device: torch.device,
) -> Tensor | None:
    """The prefixes as int64 [count, P], filled with padding; None without any.

    Raises:
        ValueError: there are not as many as sentences, or one has a word that the vocabulary has
            not.
    """
    if prefixes is None:
        return None
    if len(prefixes) != count:
        raise ValueError(
            f"there are {len(prefixes)} prefixes for {count} sentences; give one for each, None for"
            " none"
        )
    none = torch.empty(0, dtype=torch.int64)
    rows = [none if prefix is None else prefix.to("cpu", torch.int64) for prefix in prefixes]
    for number, row in enumerate(rows):
        if ((row < 0) | (row >= steps.words) | (row == symbols.padding)).any():
            raise ValueError(
                f"the prefix of sentence {number} is {row.tolist()}; its words must be numbers from"
                " 0 to"
                f" {steps.words - 1}, without padding ({symbols.padding})"
            )
    table = pad_sequence(rows, batch_first=True, padding_value=symbols.padding)
    return table.to(device) if table.shape[1] else None


class _Search:
    """A search at work.

    A hypothesis that ends keeps its row until its sentence is finished, marked as ignored, where
    too few others could
    take its place: when sampling, and in groups. Then it goes on to be of influence on its group,
        as in fairseq.
    """

    def __init__(
        self,
        continuations: Continuations,
        selection: Selection,
        options: SearchOptions,
        symbols: Symbols,
        limit: int,
        beam: int,
        sources: Sequence[Tensor],
    ):
        self.continuations, self.selection, self.options = continuations, selection, options
        self.end, self.limit, self.beam = symbols.end, limit, beam
        device, count = sources[0].device, len(sources)
        self.found: list[list[Hypothesis]] = [[] for _ in sources]
        self.sentences = torch.arange(count, device=device)
        # int64 [S * B, T + 1], with the start
        self.history = torch.full((count, 1), symbols.start, device=device)
        # [S * B, T], sums from the start on
        self.totals = torch.zeros(count, 0, dtype=torch.float32, device=device)
        self.ignored: Tensor | None = (
            None  # bool [S, B], rows of hypotheses that have ended; None: of none
        )
        self.parents = self.sentences

    def run(self, before_step: Callable[[], object] | None) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence in the order in which they ended."""
        for step in range(self.limit + 1):
            if before_step is not None:
                before_step()
            self._take(step)
            if not len(self.sentences):
                break
        return self.found

    def _take(self, step: int) -> None:
        """A step of all rows."""
        rows = self.history.shape[0] // len(self.sentences)
        ending = self.continuations.forced_to_end(self.sentences) if step else None
        if ending is not None and ending.any():
            self._repeat_first_row(ending, rows)
        of_rows = self.sentences.repeat_interleave(rows) if rows > 1 else self.sentences
        words, found = (
            each.view(len(self.sentences), rows, -1)
            for each in self.continuations.next(self.history, self.parents, of_rows)
        )
        totals = self.totals[:, -1].view(-1, rows) if step else None
        chosen = self.selection.choose(words, found, totals, self.sentences)
        origins = (
            chosen.rows + torch.arange(0, len(self.history), rows, device=words.device)[:, None]
        )
        ends = chosen.words == self.end
        # most steps of a few sentences
        if step < self.limit and self.ignored is None and not ends.any():
            self._go_on(*(each[:, : self.beam] for each in (origins, chosen.words, chosen.scores)))
            return
        ends &= chosen.scores != -math.inf
        if self.ignored is not None:
            ends[:, : self.beam] &= ~self.ignored[:, : ends.shape[1]]
        places = ends[:, : self.beam].nonzero()
        if len(places):
            self._keep(chosen.scores, origins, places)
        if step == self.limit:
            self.sentences = self.sentences[:0]
        else:
            self._let_leave(chosen, origins, ends, some=len(places) > 0)

    def _repeat_first_row(self, sentences: Tensor, rows: int) -> None:
        """In sentences bool [S], whose prefix alone has a probability, let all rows be the first:
        all end now."""
        order = torch.arange(len(self.history), device=sentences.device).view(-1, rows)
        order = torch.where(sentences[:, None], order[:, :1], order).view(-1)
        self.history, self.totals, self.parents = (
            self.history[order],
            self.totals[order],
            self.parents[order],
        )

    def _keep(self, scores: Tensor, origins: Tensor, places: Tensor) -> None:
        """Keep the hypotheses that end: places int64 [E, 2], sentence and continuation."""
        sentence, column = places.unbind(1)
        scores, rows = scores[sentence, column], origins[sentence, column]
        words = torch.nn.functional.pad(self.history[rows, 1:], (0, 1), value=self.end)
        word_scores = torch.cat([self.totals[rows], scores[:, None]], 1)
        word_scores = torch.cat([word_scores[:, :1], word_scores.diff(dim=1)], 1)
        if self.options.normalize_scores:
            scores = scores / float(words.shape[1]) ** self.options.length_penalty
        numbers = self.sentences[sentence].tolist()
        for number, each, score, of_words in zip(
            numbers, words, scores.tolist(), word_scores, strict=True
        ):
            if len(self.found[number]) < self.beam:
                self.found[number].append(Hypothesis(words=each, score=score, word_scores=of_words))

    def _let_leave(self, chosen: Chosen, origins: Tensor, ends: Tensor, some: bool) -> None:
        """Go on without continuations that end, and without the sentences that are finished, if
        `some` may be."""
        scores, words, ignored = chosen.scores, chosen.words, self.ignored
        if some:
            open_ones = [len(self.found[number]) < self.beam for number in self.sentences.tolist()]
            if not all(open_ones):
                kept = torch.tensor(open_ones, device=ends.device)
                self.sentences, ignored = (
                    self.sentences[kept],
                    None if ignored is None else ignored[kept],
                )
                scores, words, origins, ends = scores[kept], words[kept], origins[kept], ends[kept]
        if ignored is not None:
            ends[:, : self.beam] |= ignored
        columns = torch.arange(ends.shape[1], device=ends.device)
        order, places = (columns + ends * len(columns)).topk(self.beam, dim=1, largest=False)
        ignored = order >= len(columns)
        self.ignored = ignored if ignored.any() else None
        self._go_on(*(each.gather(1, places) for each in (origins, words, scores)))

    def _go_on(self, origins: Tensor, words: Tensor, scores: Tensor) -> None:
        """Make the rows of the next step: rows of this one, their next words and new scores, [S,
        beam] each."""
        self.parents = origins.reshape(-1)
        self.history = torch.cat([self.history[self.parents], words.reshape(-1, 1)], 1)
        self.totals = torch.cat([self.totals[self.parents], scores.reshape(-1, 1)], 1)
