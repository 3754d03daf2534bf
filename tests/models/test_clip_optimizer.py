"""An optimizer that was made before the clips is noticed at its first step, once."""

import logging

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.run.parameter_state import steps
from tests.models.models import loss_of, model, tokens

LEARNED = QuantConfig(clips="learned")


def train(converted, *optimizers, steps=2):
    for _ in range(steps):
        loss_of(converted(tokens())).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(("quant", "warnings"), [(LEARNED, 1), (None, 0)])
def test_an_optimizer_that_was_made_before(quant, warnings, caplog):
    """Without clips that learn nothing is lost: the weights are the parameters that they were."""
    converted = model()
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.01)
    lsq.convert(converted, quant)
    before = converted.blocks[0].up.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        train(converted, optimizer)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings and all(
        "made before lsq.convert; make the optimizer, or" in text for text in said
    )
    assert not torch.equal(before, converted.blocks[0].up.weight)


@pytest.mark.parametrize("apart", [False, True])
def test_clips_that_an_optimizer_has(apart, caplog):
    watched = len(steps.before)
    converted = model()
    lsq.convert(converted, LEARNED)
    assert len(steps.before) == watched + 1
    other = torch.nn.Linear(2, 2)
    train(converted, torch.optim.SGD(other.parameters(), lr=0.1))  # says nothing about this model
    assert len(steps.before) == watched + 1
    named = dict(converted.named_parameters())
    parts = [
        [one for name, one in named.items() if name.endswith("_clip") is clips]
        for clips in (False, True)
    ]
    groups = parts if apart else [sum(parts, [])]
    train(converted, *(torch.optim.SGD(group, lr=0.01) for group in groups))
    assert not caplog.records and len(steps.before) == watched


def test_a_model_that_is_gone_is_watched_no_more():
    watched = len(steps.before)
    lsq.convert(model(), LEARNED)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert len(steps.before) == watched
