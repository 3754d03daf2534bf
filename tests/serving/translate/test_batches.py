import random

import pytest

from lsq.serving.decode import SearchOptions
from lsq.serving.translate.batches import KEPT, PROBABILITIES, SHORT, BatchLimit, batches

GREEDY = SearchOptions(beam=1, max_len_b=SHORT - 1)


def limit(tokens, options=GREEDY, **sizes):
    return BatchLimit(
        tokens=tokens, options=options, **({"vocabulary": 100, "positions": 1024} | sizes)
    )


@pytest.mark.parametrize("tokens", [1, 7, 40, 1000])
def test_every_sentence_once_and_no_batch_too_large(tokens):
    chance = random.Random(tokens)
    lengths = [chance.randint(1, 30) for _ in range(101)]
    found = list(batches(lengths, limit(tokens)))
    assert sorted(sentence for batch in found for sentence in batch) == list(range(101))
    for batch in found:
        assert (
            len(batch) == 1 or len(batch) * max(lengths[sentence] for sentence in batch) <= tokens
        )
    in_order = [lengths[sentence] for batch in found for sentence in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_batches_are_as_large_as_they_may_be():
    assert list(batches([4, 5, 4, 5, 3], limit(12))) == [[1, 3], [0, 2, 4]]
    assert list(batches([], limit(12))) == []


def test_hypotheses_are_counted_with_their_words():
    assert limit(1024).holds(256, 1) and not limit(1024).holds(257, 1)
    assert limit(1024, SearchOptions(beam=16, max_len_b=5)).holds(16, 1)
    assert not limit(1024, SearchOptions(beam=16, max_len_b=5)).holds(17, 1)
    long = SearchOptions(beam=4, max_len_a=20.0, max_len_b=23)  # 1024 words of sources of 50 words
    assert [limit(1024, long).holds(16, words) for words in (2, 50)] == [True, True]
    assert [limit(1024, long).holds(17, words) for words in (2, 50)] == [True, False]
    assert [len(batch) for batch in batches([1] * 1024, limit(1024, SearchOptions(beam=16)))] == [
        16
    ] * 64
    assert KEPT * 1024 == 256 * SHORT


def test_probabilities_of_all_words_are_counted():
    tokens, words = 1024, 200_000
    drawn = SearchOptions(beam=5, sampling=True)
    most = PROBABILITIES * tokens // (5 * words)
    assert most == 8 and limit(tokens, drawn, vocabulary=words).holds(8, 9)
    assert not limit(tokens, drawn, vocabulary=words).holds(9, 9)
    few = SearchOptions(beam=5, sampling=True, sampling_topk=10)
    assert limit(tokens, few, vocabulary=words).holds(51, 9)
    hot = SearchOptions(beam=5, temperature=0.5)
    assert not limit(tokens, hot, vocabulary=words).holds(9, 9)
