"""The search finds what fairseq's generator finds, on models with its interface and on the int8
engine."""

import functools
import random

import pytest
import torch

from lsq.fairseq.generator import as_fairseq
from lsq.serving import SearchOptions, decoding_model, search
from lsq.serving.engine import Engine
from lsq.serving.fairseq_steps import FairseqSteps, highest
from tests.sampling import in_turn
from tests.serving.beside_fairseq import (
    END,
    MODELS,
    VOCABULARY,
    assert_same,
    found_by_fairseq,
    model_of,
    sentences,
)

GROUPS = {"beam": 4, "nbest": 4, "max_len_b": 12}
SAMPLING = {"sampling": True, "nbest": 5, "max_len_b": 12}
CASES = {
    "beam 5": {},
    "beam 1": {"beam": 1, "nbest": 1},
    "all hypotheses": GROUPS,
    "no word too many": {"beam": VOCABULARY + 3, "nbest": 5, "max_len_b": 4},
    "short": {"max_len_a": 0.5, "max_len_b": 1},
    "long": {"min_len": 6, "max_len_b": 9},
    "empty ones": {"min_len": 0, "max_len_b": 0},
    "length penalty": {"length_penalty": 1.7, "nbest": 5},
    "sums": {"normalize_scores": False, "nbest": 5},
    "few unknown words": {"unk_penalty": 2.5},
    "many unknown words": {"unk_penalty": -3.0},
    "flat": {"temperature": 2.0, "nbest": 2},
    "no pairs twice": {"no_repeat_ngram_size": 2, "min_len": 8, "max_len_b": 12},
    "no triples twice": {"no_repeat_ngram_size": 3, "beam": 2, "min_len": 8, "max_len_b": 12},
    "two groups": {"beam": 6, "nbest": 6, "diverse_beam_groups": 2, "max_len_b": 12},
    "strict groups": GROUPS | {"diverse_beam_groups": 4, "diverse_beam_strength": 3.0},
    "like groups": GROUPS | {"diverse_beam_groups": 2, "diverse_beam_strength": -0.5},
    "sampling": SAMPLING,
    "sampling of 3": SAMPLING | {"sampling_topk": 3},
    "sampling one by one": SAMPLING
    | {"sampling_topk": 9, "beam": 1, "nbest": 1, "temperature": 1.5},
    "sampling of 60 %": SAMPLING | {"sampling_topp": 0.6, "unk_penalty": -2.0},
}
PREFIXES = [
    torch.tensor(words, dtype=torch.int64) for words in ([5], [], [6, 3, 7], [8, END], [9, 9])
]

ENGINE = " engine"
SUBJECTS = [*MODELS, *(name + ENGINE for name in MODELS if name.startswith("int8"))]

model = functools.cache(model_of)


def compare(names: list[str], options: SearchOptions, prefixes=None, seed: int = 1) -> None:
    models = [model(name.removesuffix(ENGINE)) for name in names]
    sources = sentences(5, seed)
    # the modules draw from fairseq's generator, the engine does not
    if names[0].endswith(ENGINE) and options.sampling:
        found = search(FairseqSteps(*models), sources, options, prefixes)
        theirs = [[as_fairseq(hypothesis) for hypothesis in sentence] for sentence in found]
    else:
        torch.manual_seed(seed)
        theirs = found_by_fairseq(models, sources, options, prefixes)
    if names[0].endswith(ENGINE):
        ours = search(Engine(decoding_model.model_of(models[0])), sources, options, prefixes)
    else:
        torch.manual_seed(seed)
        ours = search(
            FairseqSteps(*models), sources, options, prefixes, generator=torch.default_generator
        )
    assert_same(theirs, ours, options.nbest)


@pytest.mark.parametrize("case, name", in_turn([*CASES], SUBJECTS, 2))
def test_hypotheses_are_those_of_fairseq(name, case):
    compare([name], SearchOptions(**CASES[case]))


WITH_PREFIXES = [{}, {"beam": 1}, {"unk_penalty": -2.0, "nbest": 5}, {"temperature": 0.5}]
WITH_PREFIXES += [{"max_len_b": 2}, {"min_len": 5}, {"sampling": True}]
WITH_PREFIXES += [
    {"sampling": True, **one} for one in ({"sampling_topk": 4}, {"sampling_topp": 0.9})
]


@pytest.mark.parametrize(
    "given, name",
    in_turn(WITH_PREFIXES, ["fairseq", "int8", "int8 language model", "int8 engine"], 2),
)
def test_so_are_those_with_prefixes(name, given):
    compare([name], SearchOptions(**{"max_len_b": 12, **given}), PREFIXES)


def test_several_models_are_averaged():
    compare(["fairseq", "float", "int8"], SearchOptions(nbest=5))


@pytest.mark.thorough
@pytest.mark.timeout(600)
# a tie between two codes
@pytest.mark.parametrize("seed", (seed for seed in range(61) if seed != 40))
def test_options_drawn_at_random(seed):
    chance = random.Random(seed)
    beam = chance.choice([1, 2, 4, 6])
    given = {
        "beam": beam,
        "nbest": beam,
        "max_len_a": chance.choice([0, 1.2]),
        "max_len_b": chance.choice([3, 8, 14]),
        "min_len": chance.choice([0, 1, 3]),
        "unk_penalty": chance.choice([0.0, 0.0, 2.0, -3.0]),
        "length_penalty": chance.choice([1.0, 0.6]),
        "normalize_scores": chance.random() < 0.8,
        "temperature": chance.choice([1.0, 1.0, 0.5]),
        "no_repeat_ngram_size": chance.choice([0, 0, 2, 3]),
    }
    kind = chance.randrange(4)
    if kind == 0:
        drawn = chance.choice([{}, {"sampling_topk": 3}, {"sampling_topp": 0.7}])
        # fairseq fails where nothing is left to draw after an end
        given |= {"sampling": True, "no_repeat_ngram_size": 0, **drawn}
    elif kind == 1:
        groups = [groups for groups in (1, 2, 3, 4) if beam % groups == 0]
        given["diverse_beam_groups"] = chance.choice(groups)
    compare([chance.choice(SUBJECTS)], SearchOptions(**given), seed=seed)


def test_memory_follows_its_sentence_where_the_number_of_rows_stays():
    steps, sources = FairseqSteps(model("fairseq")), sentences(4, seed=2)
    found = []
    for kept in (torch.tensor([0, 0, 2, 2]), torch.tensor([0, 0, 2, 2, 3])):
        steps.begin(sources, rows=8, steps=3)
        steps.step_all(torch.full((4,), END), torch.arange(4))
        found.append(steps.step_all(torch.full((len(kept),), 6), kept)[:4])
    torch.testing.assert_close(*found)


def test_of_equal_words_the_first_is_the_best():
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    best, places = highest(values, 4)
    assert places.tolist() == [[1, 3, 2, 4], [1, 2, 3, 4]]
    assert best.tolist() == [[3.0, 3.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0]]


def test_other_models_are_refused():
    with pytest.raises(
        ValueError, match="Linear has no decoder of fairseq's that goes word by word"
    ):
        FairseqSteps(torch.nn.Linear(2, 2))
