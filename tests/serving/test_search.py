"""The search, on models that are tables: what is found, and what is refused."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lsq.serving import Candidates, SearchOptions, search
from lsq.serving.search import length_limit

START, PADDING, END, UNKNOWN = 2, 1, 2, 3


class Table:
    """Steps of a model whose next word depends on the last one alone: log-probabilities float32 [V,
    V]."""

    longest = 12

    def __init__(self, log_probabilities: Tensor):
        self.table, self.words = log_probabilities, len(log_probabilities)
        self.rows: list[int] = []
        self.asked: list[int] = []

    def begin(self, sources: Sequence[Tensor], *, rows: int, steps: int) -> None:
        self.most = rows

    def step_all(self, words: Tensor, parents: Tensor) -> Tensor:
        self.rows.append(len(words))
        assert len(words) <= self.most
        return self.table[words]

    def step(
        self, words: Tensor, parents: Tensor, *, top: int, wanted: Tensor | None = None
    ) -> Candidates:
        self.asked.append(top)
        found = self.step_all(words, parents)
        best, places = found.sort(dim=1, descending=True, stable=True)
        named = None if wanted is None else found.gather(1, wanted)
        return Candidates(words=places[:, :top], log_probabilities=best[:, :top], wanted=named)


def table(size: int = 9, seed: int = 1) -> Table:
    generator = torch.Generator().manual_seed(seed)
    return Table((2 * torch.randn(size, size, generator=generator)).log_softmax(1))


SOURCES = [torch.tensor([5, 6, END]), torch.tensor([4, END])]


def every_sentence(model: Table, most: int) -> dict[tuple[int, ...], float]:
    """The score of every sentence of at most `most` words and its end."""
    open_ones, found = {(): 0.0}, {}
    for _ in range(most + 1):
        longer = {}
        for words, score in open_ones.items():
            row = model.table[words[-1] if words else START].tolist()
            for word, more in enumerate(row):
                if word == END and words:
                    found[(*words, END)] = score + more
                elif word not in (END, PADDING) and len(words) < most:
                    longer[(*words, word)] = score + more
        open_ones = longer
    return found


def test_a_wide_beam_finds_the_best_of_all_sentences():
    model = table(7)
    options = SearchOptions(beam=5, nbest=1, max_len_b=3, length_penalty=0.0)
    best = max(every_sentence(model, 3).items(), key=lambda each: each[1])
    for (hypothesis,) in search(model, SOURCES, options):
        assert tuple(hypothesis.words.tolist()) == best[0]
        assert hypothesis.score == pytest.approx(best[1], abs=1e-4)


def test_prefixes_begin_the_hypotheses_whatever_the_options_forbid():
    options = SearchOptions(beam=3, nbest=3, no_repeat_ngram_size=1, max_len_b=6, unk_penalty=1.0)
    first, second = search(table(), SOURCES, options, [torch.tensor([5, 5, UNKNOWN]), None])
    assert {tuple(found.words[:3].tolist()) for found in first} == {(5, 5, UNKNOWN)}
    assert len({found.words[0].item() for found in second}) > 1


def test_a_sentence_beside_one_with_a_prefix_is_searched_as_alone():
    options = SearchOptions(beam=3, nbest=3, min_len=2, max_len_b=6)
    alone = search(table(), SOURCES, options)[1]
    beside = search(table(), SOURCES, options, [torch.tensor([5, 5, 6, 5]), None])[1]
    assert [found.words.tolist() for found in beside] == [found.words.tolist() for found in alone]
    assert [found.score for found in beside] == [found.score for found in alone]


def test_finished_sentences_leave_the_batch():
    log_probabilities = torch.full((8, 8), -8.0)
    log_probabilities[:, END] = 0.0
    log_probabilities[5, END], log_probabilities[5, 5] = -9.0, 9.0
    model = Table(log_probabilities.log_softmax(1))
    search(
        model, SOURCES, SearchOptions(beam=2, max_len_b=9), [torch.tensor([4]), torch.tensor([5])]
    )
    assert model.rows[:3] == [2, 4, 4] and model.rows[-1] == 2


def test_few_different_numbers_of_words_are_asked_for():
    model = table(60)
    search(model, SOURCES, SearchOptions(beam=2, min_len=11, no_repeat_ngram_size=1))
    # 2 * 2 + 3, and as many more as are banned; the end alone
    assert set(model.asked) == {7, 15, 23, 1}
    model.asked.clear()
    search(model, SOURCES, SearchOptions(beam=3, min_len=2, max_len_b=5, unk_penalty=1.0))
    assert set(model.asked) <= {9, 1}


def test_limits_on_length():
    for options, length in (
        (SearchOptions(beam=2, max_len_a=2.0, max_len_b=0, min_len=6), 7),
        (SearchOptions(beam=2, max_len_b=200, min_len=11), Table.longest),
    ):
        results = search(table(), SOURCES, options)
        assert {len(found.words) for sentence in results for found in sentence} == {length}
    for given in ({"max_len_b": 10**400}, {"max_len_a": 1e308}):  # that no float holds
        assert length_limit(table(), SOURCES, SearchOptions(**given)) == Table.longest - 1


def test_whole_numbers_for_floats():
    model = table()
    model.longest = 101
    found = [
        search(model, SOURCES, SearchOptions(min_len=100, length_penalty=number))
        for number in (10, 10.0)
    ]
    scores = [[hypothesis.score for sentence in each for hypothesis in sentence] for each in found]
    assert scores[0] == scores[1] and -1e-17 < scores[0][0] < 0  # 101**10 is no int64


@pytest.mark.parametrize(
    "given, prefixes, words",
    [
        ({"min_len": 12}, None, "min_len is 12, but a hypothesis may have 11 words at most"),
        ({}, [None], "there are 1 prefixes for 2 sentences"),
        (
            {},
            [torch.tensor([4]), torch.tensor([9])],
            r"the prefix of sentence 1 is \[9\]; its words must be .* 0 to 8",
        ),
        ({}, [torch.tensor([PADDING]), None], r"the prefix of sentence 0 is \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused(given, prefixes, words):
    with pytest.raises(ValueError, match=words):
        search(table(), SOURCES, SearchOptions(**given), prefixes)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_model_without_numbers_is_refused(value):
    with pytest.raises(
        ValueError, match="sentence 0 of the batch has no hypothesis with a probability above 0"
    ):
        search(Table(torch.full((9, 9), value)), SOURCES, SearchOptions(max_len_b=3))


def test_a_search_ends_between_two_steps_when_it_is_told_to():
    model, calls = table(), []

    def stop_at_the_third() -> None:
        calls.append(len(model.rows))
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        search(model, SOURCES, SearchOptions(min_len=9), before_step=stop_at_the_third)
    assert calls == [0, 1, 2]
    assert search(model, [], SearchOptions()) == []
    found = search(model, SOURCES, SearchOptions(), before_step=lambda: None)
    expected = search(table(), SOURCES, SearchOptions())
    assert [one[0].words.tolist() for one in found] == [one[0].words.tolist() for one in expected]
