"""The search, on models that are tables: what is found, what is drawn, and what is refused."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lsq.serving import Candidates, SearchOptions, search
from lsq.serving.search import NO_WORD, drawn, length_limit, repeating

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


def looked_for(row: list[int], size: int) -> set[int]:
    """The words after which the row would end in an n-gram that it has already."""
    before = {tuple(row[i : i + size]) for i in range(len(row) - size + 1)}
    return {word for word in range(5) if tuple([*row, word][-size:]) in before}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 12])
def test_every_repeating_word_and_no_other(size, length):
    rows = torch.randint(0, 5, (9, length), generator=torch.Generator().manual_seed(length))
    found = repeating(rows, size)
    assert found.dtype == torch.int64 and len(found) == 9
    for row, words in zip(rows.tolist(), found.tolist(), strict=True):
        assert set(words) - {NO_WORD} == looked_for(row, size)
    # no more columns than needed
    assert repeating(torch.tensor([[1, 2, 3, 1], [1, 2, 3, 4]]), 2).tolist() == [[2], [NO_WORD]]


@pytest.mark.parametrize(
    "top, limit, allowed",
    [
        (None, -1, [0, 1, 2, 3, 4]),
        (2, -1, [1, 3]),
        (5, -1, [0, 1, 2, 3, 4]),
        (None, 0.3, [1]),
        (None, 0.5, [1, 3]),
    ],
)
def test_words_are_drawn_as_often_as_they_are_probable(top, limit, allowed):
    probabilities, draws = torch.tensor([[[0.1, 0.4, 0.05, 0.3, 0.15]]]), []
    for seed in (1, 1, 2):
        generator, row = torch.Generator().manual_seed(seed), torch.arange(5)[None, None]
        draws.append(drawn(row, probabilities.log(), None, 4000, top, limit, generator))
    probabilities = probabilities.flatten()
    expected = torch.zeros(5).index_put((torch.tensor(allowed),), probabilities[allowed])
    shares = torch.bincount(draws[0].words[0], minlength=5) / 4000
    torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.04)
    assert (shares[expected == 0] == 0).all()
    torch.testing.assert_close(draws[0].scores[0], probabilities[draws[0].words[0]].log())
    assert draws[0].words.equal(draws[1].words)
    assert len(allowed) == 1 or not draws[0].words.equal(draws[2].words)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_without_words_does_not_stop_the_others(value):
    values = torch.tensor([[[value] * 3, [-math.inf, 0.0, -math.inf]]])
    words, generator = torch.arange(3).expand(1, 2, 3), torch.Generator().manual_seed(1)
    chosen = drawn(words, values, torch.zeros(1, 2), 2, None, -1, generator)
    assert chosen.words[0, 1] == 1 and chosen.scores[0, 1] == 0
    assert not chosen.scores[0, 0] > -math.inf


@pytest.mark.parametrize(
    "given, words",
    [
        ({"beam": 0}, "beam is 0"),
        ({"beam": 2.0}, "beam is 2.0; it must be of type int"),
        ({"beam": 2, "nbest": 3}, "nbest is 3 and beam 2"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": -11}, "length_penalty is -11; it must be from -10 to 10"),
        ({"max_len_a": -1.0}, "max_len_a is -1.0"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be from"),
        ({"sampling": True, "sampling_topk": 0}, "sampling_topk is 0"),
        ({"sampling_topk": 3}, "they need sampling"),
        ({"sampling": True, "sampling_topp": 1.5}, "sampling_topp is 1.5"),
        ({"sampling": True, "sampling_topp": 0.5, "sampling_topk": 2}, "not both"),
        ({"sampling": "no"}, "sampling is 'no'; it must be of type bool"),
        ({"nbest": True}, "nbest is True"),
        ({"max_len_a": None}, "max_len_a is None; it must be of type float"),
        ({"unk_penalty": -1}, "unk_penalty is -1; it must be at least 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        SearchOptions(**given)
