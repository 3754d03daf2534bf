"""Decoding on the test device: the CPU's hypotheses, wherever the search lies, and steps that wait
for nothing."""

import pytest
import torch

from lsq.run.backends import for_device
from lsq.serving import SearchOptions, search
from lsq.serving.decoding_model import model_of
from lsq.serving.engine import Engine
from tests.device.standin import PLACE, ordered
from tests.device.watch import watched
from tests.serving.models import batch, small_model
from tests.serving.test_engine import sentences

LAUNCHES = 16
"""PyTorch's in a step, between the lists of the engine."""


def model(**options):
    return model_of(small_model(heads=2, encoder_layers=1, **options))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "searches_on_the_device", [pytest.param(False, marks=pytest.mark.thorough), True]
)
def test_a_search_finds_what_it_finds_on_the_cpu(searches_on_the_device):
    trained, source = model(), sentences(batch())
    options = SearchOptions(beam=2, max_len_b=3, unk_penalty=0.5)
    prefixes = [None, torch.tensor([5, 6]), None]
    expected = search(Engine(trained), source, options, prefixes)
    given = [one.to(PLACE) for one in source] if searches_on_the_device else source
    with ordered():
        found = search(Engine(trained, for_device(PLACE)), given, options, prefixes)
    for first, second in zip(expected, found, strict=True):
        assert [one.words.tolist() for one in second] == [one.words.tolist() for one in first]
        assert all(one.words.device == given[0].device for one in second)


@pytest.mark.thorough
def test_nothing_waits_inside_a_step():
    engine = Engine(model(), for_device(PLACE))
    engine.begin(sentences(batch()), rows=3, steps=4)
    words, parents = torch.full((3,), 2).to(PLACE), torch.arange(3).to(PLACE)
    asked = torch.tensor([[4, 5]] * 3).to(PLACE)
    for step in range(4):
        with watched() as record:
            found = engine.step(words, parents, top=5, wanted=asked)
        if step:  # the first one prepares
            assert not record.waits, record.table(record.waits)
            assert len(record.launches) <= LAUNCHES, record.table(record.launches)
        words, parents = found.words[:, 1].contiguous(), parents.flip(0)
