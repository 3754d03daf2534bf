"""Sentences of like length together, as many as memory is meant for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lsq.serving.decode import SearchOptions
from lsq.serving.decode.search import most_words

SHORT = 256
"""Hypotheses count as so many words at least: many short ones together gain nothing."""
KEPT = 64
"""Words of hypotheses for each word of the sources."""
PROBABILITIES = 8192
"""The same for probabilities of a step."""


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """What is translated together at most.

    Of S sentences, `beam` hypotheses each, with as many words as the options allow: their sources
    have at most `tokens` words, with padding; the hypotheses KEPT times as many, all counted as the
    longest; and the words that may follow them, which are all of the vocabulary where they are
    drawn from it, PROBABILITIES times as many.
    """

    tokens: int
    options: SearchOptions
    vocabulary: int
    """Words of the target."""
    positions: int
    """Words of a hypothesis, its end included, at most."""

    def holds(self, sentences: int, longest: int) -> bool:
        """Whether so many sentences, the longest of so many words, are no more than that."""
        options, rows = self.options, sentences * self.options.beam
        steps = max(SHORT, most_words(options, longest, self.positions) + 1)
        candidates = (
            self.vocabulary if options.all_words else max(options.sampling_topk, 2 * options.beam)
        )
        return (
            sentences * longest <= self.tokens
            and rows * steps <= KEPT * self.tokens
            and rows * candidates <= PROBABILITIES * self.tokens
        )


def batches(lengths: Sequence[int], limit: BatchLimit) -> Iterator[list[int]]:
    """Numbers of sentences, the longest first; a batch is within the limit, or has one sentence."""
    batch: list[int] = []
    for sentence in sorted(range(len(lengths)), key=lambda sentence: -lengths[sentence]):
        if batch and not limit.holds(len(batch) + 1, lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(sentence)
    if batch:
        yield batch
