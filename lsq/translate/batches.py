"""Sentences of like length together."""

from collections.abc import Iterator, Sequence


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of sentences, the longest first; a batch has at most `tokens` words with its padding, or one sentence."""
    batch: list[int] = []
    for sentence in sorted(range(len(lengths)), key=lambda sentence: -lengths[sentence]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(sentence)
    if batch:
        yield batch
