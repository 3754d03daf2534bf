"""The projection onto the vocabulary of a model of others, alone and with a cross-entropy."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lsq
from lsq.config import QuantConfig
from lsq.layers.head import Head
from tests.layers.shapes import decibels
from tests.layers.test_logits import HIDDEN, WORDS, Model

ROWS = 37


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(4)
    return Model()


def batch(ignored: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    target = torch.randint(WORDS, (ROWS,), generator=random)
    counted = torch.rand(ROWS, generator=random) >= ignored
    return torch.randn(ROWS, HIDDEN, generator=random), target.where(counted, -100)


@pytest.mark.parametrize("ignored", [0.0, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_and_its_gradients_are_pytorchs(plain, ignored, smoothing, reduction):
    x, target = batch(ignored)
    mine = copy.deepcopy(plain)
    lsq.convert(mine)
    expected, found = (
        functional.cross_entropy(model(x), target, label_smoothing=smoothing, reduction=reduction)
        for model in (plain, mine)
    )
    assert found.item() == pytest.approx(expected.item(), rel=3e-3)
    expected.backward()
    found.backward()
    for name, parameter in plain.named_parameters():
        assert decibels(parameter.grad, mine.get_parameter(name).grad) > 20, name


def test_losses_are_those_of_the_logits(plain):
    """Also those that no program has."""
    x, target = batch(0.3)
    lsq.convert(plain)
    plain(x).sum().backward()
    logits, whole = plain(x).clone(), target.clamp(min=0)
    for given, how in [
        (target, {}),
        (target, {"weight": torch.rand(WORDS)}),
        (target, {"reduction": "none"}),
        (functional.one_hot(whole, WORDS).float(), {}),
    ]:
        found, expected = (
            functional.cross_entropy(one, given, **how) for one in (plain(x), logits)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_targets_that_are_none(plain):
    x, _ = batch()
    lsq.convert(plain)
    nothing = torch.full((ROWS,), 7)
    assert functional.cross_entropy(plain(x), nothing, ignore_index=7).isnan()
    loss = functional.cross_entropy(plain(x), nothing, ignore_index=7, reduction="sum")
    loss.backward()
    assert loss == 0
    for target in (WORDS, -1):
        with pytest.raises(
            ValueError, match=f"targets lie between .*{target}.*; the vocabulary has 53 words"
        ):
            functional.cross_entropy(plain(x), torch.tensor([3] * (ROWS - 1) + [target]))


def test_a_weight_that_an_embedding_shares():
    torch.manual_seed(6)
    model = Model()
    model.embedding = nn.Embedding(WORDS, HIDDEN)
    model.head.weight = model.embedding.weight
    report = lsq.convert(model)
    assert "head" in report.converted
    words = torch.arange(ROWS) % WORDS
    functional.cross_entropy(model(model.embedding(words)), words).backward()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.grad.any(dim=1).all()
    assert type(lsq.revert(model).head) is nn.Linear


@pytest.mark.parametrize(
    "options", [{"skip": "head"}, {"fused": False}, {"quant": QuantConfig(weight_format="int4")}]
)
def test_it_stays_or_is_refused(plain, options):
    lsq.convert(plain, **options)
    assert not isinstance(plain.head, Head)


def test_frozen_weights_and_bfloat16(plain):
    x, target = batch(0.5)
    plain.head.weight.requires_grad_(False)
    lsq.convert(plain.to(torch.bfloat16))
    loss = functional.cross_entropy(plain(x.bfloat16()), target)
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert plain.head.weight.grad is None and plain.inner.weight.grad.any()
