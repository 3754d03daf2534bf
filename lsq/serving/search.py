"""Beam search and sampling, for many sentences at once.

It finds what fairseq's generator finds on the same model, scores included. S open sentences, B rows
of each (one at the first step, then `beam`), R = S * B rows, V words of the vocabulary, C words
that may follow a row, N chosen continuations of a sentence, T words of a row so far.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Hypothesis, Steps, Symbols

FORBIDDEN = -math.inf
NO_WORD = -1
"""Fills rows that have fewer banned words than others."""
BANNED_TOGETHER = 8
"""Words in place of banned ones are asked for in multiples of this: models prepare few steps."""


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
        before_step: called before each step. If it raises an error, the search ends, and `steps`
            can begin another one.

    Raises:
        ValueError: no hypothesis can be as long as the options want, prefixes do not fit, or no
            hypothesis of a sentence has a probability above 0.
    """
    if not sources:
        return []
    limit, device = length_limit(steps, sources, options), sources[0].device
    forced = forced_words(steps, len(sources), prefixes, symbols, device)
    continuations = _Continuations(steps, options, symbols, limit, forced)
    if options.sampling and generator is None:
        generator = torch.Generator(device).manual_seed(options.seed)
    steps.begin(sources, rows=len(sources) * continuations.beam, steps=limit + 1)
    results = _Search(continuations, len(sources), device, generator).run(before_step)
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
    """Return the most words of a hypothesis before its end; ValueError if options want more."""
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
    """Return the most words of a hypothesis before its end, if the longest source of the batch has
    `longest` words and the model has `positions` positions."""
    # the smaller first: floats do not hold every whole number
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


class _Continuations:
    """Words that may follow each row, under the options of a search.

    The most probable words are enough: if the options forbid or penalise up to f words of a row,
    its best n words are among the n + f best of the model. `needed` is n; None: all words. Forced
    words, int64 [S, P] with padding behind them, are asked for by name.
    """

    def __init__(
        self,
        steps: Steps,
        options: SearchOptions,
        symbols: Symbols,
        limit: int,
        forced: Tensor | None,
    ):
        self.steps, self.options, self.symbols, self.limit = steps, options, symbols, limit
        self.forced, self.step = forced, 0
        self.beam = min(options.beam, steps.words - 1)  # padding is never chosen
        self.top = min(options.sampling_topk, steps.words) if options.sampling_topk > 0 else None
        self.needed = self.top if options.sampling else 2 * self.beam  # half may end
        if options.all_words:
            self.needed = None

    def next(self, history: Tensor, parents: Tensor, sentences: Tensor) -> tuple[Tensor, Tensor]:
        """Return (words int64 [R, C] that may follow at the next step, their log-probabilities
        float32 [R, C], -inf for forbidden ones).

        Args:
            history: int64 [R, T + 1], the start and the words of each row.
            parents: int64 [R], as `Steps.step` takes them.
            sentences: int64 [R], the sentence of each row.
        """
        step, self.step = self.step, self.step + 1
        last, end = history[:, -1], self.symbols.end
        if step == self.limit:  # only the end may follow the longest hypotheses
            if self.needed is None:
                words, values = self._all(last, parents)
                return words, values.masked_fill(words != end, FORBIDDEN)
            wanted = last.new_full((len(last), 1), end)
            return wanted, self.steps.step(last, parents, top=1, wanted=wanted).wanted
        forced, banned, fixed = None, history[:, :0], [self.symbols.padding]
        if self.forced is not None and step < self.forced.shape[1]:
            forced = self.forced[sentences, step]
        # a forced end counts even so; fairseq begins to forbid the end behind the longest prefix
        if step < self.options.min_len:
            fixed.append(end)
        if self.options.no_repeat_ngram_size:
            banned = repeating(history[:, 1:], self.options.no_repeat_ngram_size)
        words, values, wanted = self._ask(last, parents, forced, banned.shape[1])
        values = self._penalise_unknown(words, values)
        for word in (*fixed, *banned.T[:, :, None]):
            values = values.masked_fill(words == word, FORBIDDEN)
        return (words, values) if forced is None else self._force(words, values, forced, wanted)

    def forced_to_end(self, sentences: Tensor) -> Tensor | None:
        """Return bool [S], whether the prefixes of sentences end at the next step; None: no."""
        if self.forced is None or self.step >= min(self.limit, self.forced.shape[1]):
            return None
        return self.forced[sentences, self.step] == self.symbols.end

    def _all(self, last: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        values = self.steps.step_all(last, parents)
        if self.options.temperature != 1:
            values = (values / self.options.temperature).log_softmax(1)
        return torch.arange(values.shape[1], device=last.device).expand(len(values), -1), values

    def _ask(
        self, last: Tensor, parents: Tensor, forced: Tensor | None, banned: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the model's (words, log-probabilities, log-probabilities of `forced` [R, 1]).
        There are enough words for `banned` of them to be banned."""
        wanted = None if forced is None else forced[:, None]
        if self.needed is None:
            words, values = self._all(last, parents)
            return words, values, None if wanted is None else values.gather(1, wanted)
        if wanted is not None:
            wanted = torch.where(wanted == self.symbols.padding, self.symbols.end, wanted)
        # 3 for padding, end and unknown word, even if they are allowed: a model may prepare a step
        # for each number
        top = self.needed + 3 + -(-banned // BANNED_TOGETHER) * BANNED_TOGETHER
        given = self.steps.step(last, parents, top=min(self.steps.words, top), wanted=wanted)
        return given.words, given.log_probabilities, given.wanted

    def _penalise_unknown(self, words: Tensor, values: Tensor) -> Tensor:
        penalty = self.options.unk_penalty
        if not penalty:
            return values
        return torch.where(words == self.symbols.unknown, values - penalty, values)

    def _force(
        self, words: Tensor, values: Tensor, forced: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Allow only the forced word of a row that has one; no option forbids it."""
        word = forced[:, None]
        free = word == self.symbols.padding
        value = self._penalise_unknown(word, wanted).masked_fill(free, FORBIDDEN)
        if self.needed is None:
            return words, torch.where(free, values, torch.where(words == word, value, FORBIDDEN))
        values = torch.cat([values.masked_fill(~free, FORBIDDEN), value], 1)
        return torch.cat([words, word], 1), values


def repeating(history: Tensor, size: int) -> Tensor:
    """Return the words that would repeat an n-gram of their row (Paulus et al. 2018, section 2.5).

    Args:
        history: int64 [R, T], the words of each row without its start, which is in no n-gram.
        size: n, at least 1.

    Returns:
        int64 [R, W], filled with NO_WORD; W: the largest number of such words of a row.
    """
    length = history.shape[1]
    if length < size:
        return history.new_empty(len(history), 0)
    last = history[:, length - size + 1 :]  # the n - 1 words that the next one would complete
    before = history[:, :-1].unfold(1, size - 1, 1) if size > 1 else history[:, :, None][:, :, :0]
    repeats = (before == last[:, None]).all(2)
    words = history[:, size - 1 :].masked_fill(~repeats, NO_WORD)
    return words.sort(1, descending=True).values[:, : int(repeats.sum(1).max())]


class Chosen(NamedTuple):
    """Chosen continuations of S sentences."""

    scores: Tensor
    """float32 [S, N], sums of log-probabilities from the start on."""
    words: Tensor
    """int64 [S, N]."""
    rows: Tensor
    """int64 [S, N], the row of the sentence that a continuation extends, 0 to B - 1."""


def best(
    words: Tensor, log_probabilities: Tensor, totals: Tensor | None, count: int, vocabulary: int
) -> Chosen:
    """Choose the `count` continuations with the highest scores, best first; never the whole
    vocabulary, since padding is not chosen.

    Args:
        words: int64 [S, B, C].
        log_probabilities: float32 [S, B, C], -inf where a word is forbidden.
        totals: float32 [S, B], the scores of the rows; None at the first step.
    """
    sentences, rows, width = log_probabilities.shape
    scores = log_probabilities if totals is None else log_probabilities + totals[:, :, None]
    count = min(count, rows * vocabulary - 1, rows * width)
    highest, columns = scores.reshape(sentences, -1).topk(count, dim=1)
    chosen = words.reshape(sentences, -1).gather(1, columns)
    return Chosen(highest, chosen, torch.div(columns, width, rounding_mode="floor"))


def drawn(
    words: Tensor,
    log_probabilities: Tensor,
    totals: Tensor | None,
    count: int,
    top: int | None,
    limit: float,
    generator: torch.Generator,
) -> Chosen:
    """Draw `count` continuations, equally many of each row; further arguments as in `best`.

    Args:
        top: draw from so many most probable words (Fan et al. 2018); None: see `limit`.
        limit: draw from the most probable words up to this sum (Holtzman et al. 2020); -1: all.
    """
    sentences, rows, _ = words.shape
    words, probabilities = _limited(words, log_probabilities, top, limit)
    # a row of zeros or NaN draws any column, with probability 0
    possible = probabilities.sum(2, keepdim=True) > 0
    weights = torch.where(possible, probabilities, 1.0).view(sentences * rows, -1)
    columns = torch.multinomial(weights, count // rows, replacement=True, generator=generator).view(
        sentences, rows, -1
    )
    scores = probabilities.gather(2, columns).log()
    if totals is not None:
        scores = scores + totals[:, :, None]
    numbers = torch.arange(rows, device=words.device)[:, None].expand_as(columns)
    parts = (scores, words.gather(2, columns), numbers)
    return Chosen(*(each.reshape(sentences, count) for each in parts))


def _limited(
    words: Tensor, log_probabilities: Tensor, top: int | None, limit: float
) -> tuple[Tensor, Tensor]:
    """Return the words to draw from, [S, B, C'], and their probabilities, of a sum up to 1."""
    if top is not None:
        highest, columns = log_probabilities.topk(min(top, words.shape[2]), dim=2)
        # padded if only the end may follow: every step draws as many random numbers
        padding = (0, top - highest.shape[2])
        words = functional.pad(words.gather(2, columns), padding)
        return words, functional.pad(highest.exp(), padding)
    probabilities = log_probabilities.exp()
    if limit == -1:
        return words, probabilities
    probabilities, columns = probabilities.sort(dim=2, descending=True)
    before = functional.pad(probabilities.cumsum(2)[:, :, :-1], (1, 0), value=-1.0)
    kept = before < limit
    most = int(kept.sum(2).max())
    return words.gather(2, columns[:, :, :most]), (probabilities * kept)[:, :, :most]


class _Search:
    """The state of a search.

    In sampling there may be no further row to take the place of a hypothesis that has ended. It
    then keeps its row, marked as ignored, until its sentence is finished, as in fairseq.
    """

    def __init__(
        self,
        continuations: _Continuations,
        count: int,
        device: torch.device,
        generator: torch.Generator | None,
    ):
        self.continuations, self.beam = continuations, continuations.beam
        self.options, self.limit = continuations.options, continuations.limit
        symbols = continuations.symbols
        self.end, self.generator = symbols.end, generator
        self.results: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.sentences = torch.arange(count, device=device)
        # int64 [S * B, T + 1], with the start
        self.history = torch.full((count, 1), symbols.start, device=device)
        # [S * B, T], sums of log-probabilities from the start on
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
        chosen = self._choose(words, values, self.totals[:, -1].view(-1, rows) if step else None)
        firsts = torch.arange(0, len(self.history), rows, device=words.device)
        origins = chosen.rows + firsts[:, None]
        ends = chosen.words == self.end
        # a shortcut for steps without an end, which most are for few sentences
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

    def _choose(self, words: Tensor, values: Tensor, totals: Tensor | None) -> Chosen:
        if self.options.sampling:
            limits = self.continuations.top, self.options.sampling_topp
            return drawn(words, values, totals, self.beam, *limits, self.generator)
        return best(words, values, totals, 2 * self.beam, self.continuations.steps.words)

    def _repeat_first_row(self, sentences: Tensor, rows: int) -> None:
        """Copy the first row of `sentences`, bool [S], to their others: all end as the prefix."""
        order = torch.arange(len(self.history), device=sentences.device).view(-1, rows)
        order = torch.where(sentences[:, None], order[:, :1], order).view(-1)
        self.history, self.totals = self.history[order], self.totals[order]
        self.parents = self.parents[order]

    def _keep(self, scores: Tensor, origins: Tensor, ended: Tensor) -> None:
        """Keep the hypotheses that end: `ended` int64 [E, 2], sentence and continuation."""
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
        """Extend rows `origins` by `words`, with new sums `scores`; all are [S, beam]."""
        self.parents = origins.reshape(-1)
        self.history = torch.cat([self.history[self.parents], words.reshape(-1, 1)], 1)
        self.totals = torch.cat([self.totals[self.parents], scores.reshape(-1, 1)], 1)
