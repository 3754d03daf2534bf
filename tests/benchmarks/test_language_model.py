"""The language model of the benchmarks of gradient exchange, and its text."""

import math

import pytest
import torch
from language_model import (
    LanguageModel,
    Shape,
    held_out_loss,
    make_sentences,
    make_text,
    microbatch,
    schedule,
)

SMALL = Shape(hidden=32, layers=1, positions=16)


def test_the_default_model_has_the_size_that_is_written():
    assert sum(parameter.numel() for parameter in LanguageModel(Shape(), 1).parameters()) == 660_608


def test_a_new_model_knows_nothing_and_sees_no_later_bytes():
    model = LanguageModel(SMALL, 1)
    tokens = torch.arange(32).view(2, 16)
    assert model(tokens).item() == pytest.approx(math.log(256), abs=0.2)
    changed = tokens.clone()
    changed[:, -1] = 200
    first, second = (
        torch.autograd.grad(model(x), model.positions.weight)[0] for x in (tokens, changed)
    )
    assert first[-1].abs().max() == 0 and second[-1].abs().max() == 0


def test_the_same_seed_makes_the_same_weights_and_leaves_the_generator():
    before = torch.random.get_rng_state()
    first, second, other = (LanguageModel(SMALL, seed) for seed in (1, 1, 2))
    assert torch.equal(first.embedding.weight, second.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_text_and_microbatches_repeat_themselves():
    text = make_text(60, 20)
    assert torch.equal(text.train, make_text(60, 20).train)
    assert bytes(text.train.tolist()).decode().count(" = ") == 60
    batch = microbatch(text.train, 7, sequences=3, length=16)
    assert batch.shape == (3, 16) and torch.equal(
        batch, microbatch(text.train, 7, sequences=3, length=16)
    )
    assert not torch.equal(batch, microbatch(text.train, 8, sequences=3, length=16))
    assert held_out_loss(LanguageModel(SMALL, 1), text.held_out, sequences=4, length=16) > 0


def test_sentences_are_words_that_return():
    text = make_sentences(5000, 100)
    assert torch.equal(text.train, make_sentences(5000, 100).train)
    words = bytes(text.train.tolist()).decode().split(" ")
    assert len(words) == 5000 and 500 < len(set(words)) <= 1000
    following = {after for word, after in zip(words, words[1:], strict=False) if word == words[0]}
    assert 1 <= len(following) <= 20


def test_schedule():
    assert schedule(0, 100, 10) == pytest.approx(0.1)
    assert schedule(10, 100, 10) == pytest.approx(1)
    assert schedule(99, 100, 10) == pytest.approx(0, abs=1e-3)
