"""The search: follows the most probable hypotheses of many sentences at once.

It finds what fairseq's generator finds on the same model, scores included. S open sentences, B rows
of each (one at the first step, then `beam`), N continuations of a sentence, T words of a row so
far.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lsq.serving.continuations import (
    BeamSelection,
    Chosen,
    Continuations,
    GroupSelection,
    SamplingSelection,
)
from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis, Steps, Symbols


@torch.no_grad()
def search(
    steps: Steps,
    sources: Sequence[Tensor],
    options: SearchOptions,
    prefixes: Sequence[Tensor | None] | None = None,
    *,
    symbols: Symbols = Symbols(),  # noqa: B008  frozen
    generator: torch.Generator | None = None,
    before_step: Callable[[], object] | None = None,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence, best first, at most `options.nbest`.

    Args:
        steps: a model.
        sources: sentences int64 [S], each with its end.
        prefixes: words int64 [P] that the hypotheses of each sentence begin with, or None; limits
            on length include them.
        symbols: special words of the vocabulary.
        generator: source of random numbers for sampling; None: a new one, with `options.seed`.
        before_step: called before each step; an exception of it ends the search, and `steps` can
            be used for another.

    Raises:
        ValueError: no hypothesis can be as long as the options want, prefixes or groups do not fit,
            or no hypothesis of a sentence has a probability above 0.
    """
    if not sources:
        return []
    limit = length_limit(steps, sources, options)
    beam = min(options.beam, steps.words - 1)  # padding is never chosen
    forced = forced_words(steps, len(sources), prefixes, symbols, sources[0].device)
    if options.sampling:
        generator = generator or torch.Generator(sources[0].device).manual_seed(options.seed)
        selection = SamplingSelection(options, beam, steps.words, generator)
    elif options.diverse_beam_groups != -1:
        selection = GroupSelection(options, beam, steps.words)
    else:
        selection = BeamSelection(beam, steps.words)
    continuations = Continuations(steps, options, symbols, limit, selection.needed, forced)
    steps.begin(sources, rows=len(sources) * beam, steps=limit + 1)
    results = _Search(continuations, selection, beam, sources).run(before_step)
    for number, sentence in enumerate(results):
        if not sentence or any(math.isnan(hypothesis.score) for hypothesis in sentence):
            raise ValueError(
                f"sentence {number} of the batch has no hypothesis with a probability above 0: the"
                " options or its prefix forbid every word, or the model computes NaN"
            )
    return [
        sorted(sentence, key=lambda hypothesis: -hypothesis.score)[: options.nbest]
        for sentence in results
    ]


def length_limit(steps: Steps, sources: Sequence[Tensor], options: SearchOptions) -> int:
    """Return how many words a hypothesis may have before its end; ValueError if the options want
    more."""
    longest = max(len(source) for source in sources)
    limit = most_words(options, longest, steps.longest)
    if options.min_len > limit:
        raise ValueError(
            f"min_len is {options.min_len}, but a hypothesis may have {limit} words at most"
            f" (max_len_a {options.max_len_a}, max_len_b {options.max_len_b}, {longest} words in"
            f" the longest source, {steps.longest} positions in the model)"
        )
    return limit


def most_words(options: SearchOptions, longest: int, positions: int) -> int:
    """Return how many words a hypothesis may have before its end, if the longest source of the
    batch has `longest` words and the model so many positions."""
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
    """Return the prefixes as int64 [count, P], filled with padding, or None if all are empty;
    ValueError if their number is not `count`, or one has a word outside the vocabulary."""
    if prefixes is None:
        return None
    if len(prefixes) != count:
        raise ValueError(
            f"there are {len(prefixes)} prefixes for {count} sentences; give one for each, None for"
            " none"
        )
    empty = torch.empty(0, dtype=torch.int64)
    rows = [empty if prefix is None else prefix.to("cpu", torch.int64) for prefix in prefixes]
    for number, row in enumerate(rows):
        if ((row < 0) | (row >= steps.words) | (row == symbols.padding)).any():
            raise ValueError(
                f"the prefix of sentence {number} is {row.tolist()}; its words must be numbers from"
                f" 0 to {steps.words - 1}, without padding ({symbols.padding})"
            )
    table = pad_sequence(rows, batch_first=True, padding_value=symbols.padding)
    return table.to(device) if table.shape[1] else None


class _Search:
    """The state of a search.

    When sampling, and in groups, too few rows may be left to replace that of a hypothesis that has
    ended: it keeps its row, marked as ignored, until its sentence is finished, and goes on to
    influence its group, as in fairseq.
    """

    def __init__(
        self,
        continuations: Continuations,
        selection: BeamSelection | SamplingSelection | GroupSelection,
        beam: int,
        sources: Sequence[Tensor],
    ):
        self.continuations, self.selection, self.beam = continuations, selection, beam
        self.options, self.limit = continuations.options, continuations.limit
        symbols, device, count = continuations.symbols, sources[0].device, len(sources)
        self.end = symbols.end
        self.results: list[list[Hypothesis]] = [[] for _ in sources]
        self.sentences = torch.arange(count, device=device)
        # int64 [S * B, T + 1], with the start
        self.history = torch.full((count, 1), symbols.start, device=device)
        # [S * B, T], sums from the start on
        self.totals = torch.zeros(count, 0, dtype=torch.float32, device=device)
        # bool [S, B], rows of hypotheses that have ended, or None
        self.ignored: Tensor | None = None
        self.parents = self.sentences

    def run(self, before_step: Callable[[], object] | None) -> list[list[Hypothesis]]:
        """Return the hypotheses of each sentence in the order in which they ended."""
        for step in range(self.limit + 1):
            if before_step is not None:
                before_step()
            self._take(step)
            if not len(self.sentences):
                break
        return self.results

    def _take(self, step: int) -> None:
        rows = self.history.shape[0] // len(self.sentences)
        ending = self.continuations.forced_to_end(self.sentences) if step else None
        if ending is not None and ending.any():
            self._repeat_first_row(ending, rows)
        of_rows = self.sentences.repeat_interleave(rows) if rows > 1 else self.sentences
        words, values = (
            each.view(len(self.sentences), rows, -1)
            for each in self.continuations.next(self.history, self.parents, of_rows)
        )
        totals = self.totals[:, -1].view(-1, rows) if step else None
        chosen = self.selection.choose(words, values, totals, self.sentences)
        firsts = torch.arange(0, len(self.history), rows, device=words.device)
        origins = chosen.rows + firsts[:, None]
        ends = chosen.words == self.end
        # most steps of a few sentences
        if step < self.limit and self.ignored is None and not ends.any():
            self._extend(*(each[:, : self.beam] for each in (origins, chosen.words, chosen.scores)))
            return
        ends &= chosen.scores != -math.inf
        if self.ignored is not None:
            ends[:, : self.beam] &= ~self.ignored[:, : ends.shape[1]]
        ended = ends[:, : self.beam].nonzero()
        if len(ended):
            self._keep(chosen.scores, origins, ended)
        if step == self.limit:
            self.sentences = self.sentences[:0]
        else:
            self._drop_ended(chosen, origins, ends, some=len(ended) > 0)

    def _repeat_first_row(self, sentences: Tensor, rows: int) -> None:
        """Make all rows of sentences bool [S] the first: only their prefix has a probability, and
        all end now."""
        order = torch.arange(len(self.history), device=sentences.device).view(-1, rows)
        order = torch.where(sentences[:, None], order[:, :1], order).view(-1)
        self.history, self.totals = self.history[order], self.totals[order]
        self.parents = self.parents[order]

    def _keep(self, scores: Tensor, origins: Tensor, ended: Tensor) -> None:
        """Keep the hypotheses that end: int64 [E, 2], sentence and continuation."""
        sentence, column = ended.unbind(1)
        scores, rows = scores[sentence, column], origins[sentence, column]
        words = functional.pad(self.history[rows, 1:], (0, 1), value=self.end)
        word_scores = torch.cat([self.totals[rows], scores[:, None]], 1)
        word_scores = torch.cat([word_scores[:, :1], word_scores.diff(dim=1)], 1)
        if self.options.normalize_scores:
            scores = scores / float(words.shape[1]) ** self.options.length_penalty
        numbers = self.sentences[sentence].tolist()
        for number, *values in zip(numbers, words, scores.tolist(), word_scores, strict=True):
            if len(self.results[number]) < self.beam:
                self.results[number].append(
                    Hypothesis(words=values[0], score=values[1], word_scores=values[2])
                )

    def _drop_ended(self, chosen: Chosen, origins: Tensor, ends: Tensor, some: bool) -> None:
        """Go on without continuations that end and, if `some` did, without finished sentences."""
        scores, words, ignored = chosen.scores, chosen.words, self.ignored
        if some:
            is_open = [len(self.results[number]) < self.beam for number in self.sentences.tolist()]
            if not all(is_open):
                kept = torch.tensor(is_open, device=ends.device)
                self.sentences = self.sentences[kept]
                ignored = None if ignored is None else ignored[kept]
                scores, words, origins, ends = scores[kept], words[kept], origins[kept], ends[kept]
        if ignored is not None:
            ends[:, : self.beam] |= ignored
        columns = torch.arange(ends.shape[1], device=ends.device)
        order, first = (columns + ends * len(columns)).topk(self.beam, dim=1, largest=False)
        ignored = order >= len(columns)
        self.ignored = ignored if ignored.any() else None
        self._extend(*(each.gather(1, first) for each in (origins, words, scores)))

    def _extend(self, origins: Tensor, words: Tensor, scores: Tensor) -> None:
        """Make the rows of the next step: rows of this one, their next words and scores, [S, beam]
        each."""
        self.parents = origins.reshape(-1)
        self.history = torch.cat([self.history[self.parents], words.reshape(-1, 1)], 1)
        self.totals = torch.cat([self.totals[self.parents], scores.reshape(-1, 1)], 1)
