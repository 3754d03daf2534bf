import random

import pytest

from lsq.translate.batches import batches


@pytest.mark.parametrize("tokens", [1, 7, 40, 1000])
def test_every_sentence_once_and_no_batch_too_large(tokens):
    chance = random.Random(tokens)
    lengths = [chance.randint(1, 30) for _ in range(101)]
    found = list(batches(lengths, tokens))
    assert sorted(sentence for batch in found for sentence in batch) == list(range(101))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[sentence] for sentence in batch) <= tokens
    in_order = [lengths[sentence] for batch in found for sentence in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_batches_are_as_large_as_they_may_be():
    assert list(batches([2, 3, 2, 3, 1], 6)) == [[1, 3], [0, 2, 4]]
    assert list(batches([], 6)) == []
