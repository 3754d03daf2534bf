"""The first pass of a fused layer, in which it is compared with the code of its class."""

import copy
import logging

import pytest
import torch

import lsq
from tests.models.test_exact import result
from tests.models.zoo import FLOAT, fused, made, right_padded

IDS = right_padded((11, 6))["input_ids"]
FILE = "lsq.models.comparison"


def later(*values) -> list:
    return [pytest.param(one, marks=pytest.mark.thorough) for one in values]


def compared(model: torch.nn.Module) -> set[bool]:
    return {one.compared for one in model.modules() if hasattr(one, "compared")}


def differences(caplog) -> list[float]:
    return [float(one.args[1]) for one in caplog.records if one.name == FILE]


@pytest.mark.parametrize("name", ["llama", "t5 v1.1", *later("gpt2", "mbart")])
def test_every_architecture_agrees(name, caplog):
    model = made(name)
    report = lsq.convert(model, FLOAT)
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    modes = [one.training for one in model.modules()]
    with caplog.at_level(logging.DEBUG, logger=FILE):
        model(**batch)
    assert compared(model) == {True}
    assert len(differences(caplog)) == len(report.fused) and max(differences(caplog)) < 1e-5
    assert modes == [one.training for one in model.modules()]
    caplog.clear()
    model(**batch)
    assert not differences(caplog)


def test_it_draws_no_random_numbers():
    model, states = made("bert"), []
    for check in (True, False):
        mine = copy.deepcopy(model)
        lsq.convert(mine, FLOAT, check=check)
        torch.manual_seed(1)
        result(mine)
        states.append(torch.get_rng_state())
        assert compared(mine) == {True}
    assert torch.equal(*states)


@pytest.mark.parametrize("name", ["llama", *later("bert", "t5 encoder")])
def test_another_result_is_refused(name, monkeypatch):
    """Here of attention that is hotter than the layer says, below all that is looked at."""
    model = made(name)
    mine, blind = copy.deepcopy(model), copy.deepcopy(model)
    lsq.convert(mine, FLOAT)
    lsq.convert(blind, FLOAT, check=False)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *arguments, scale, **options: sdpa(*arguments, scale=20 * scale, **options),
    )
    result(blind)
    with pytest.raises(
        RuntimeError, match=r"differ by 0\.\d+ of .* lsq\.revert\(model\) .* check=False"
    ):
        result(mine)


@pytest.mark.parametrize("name", ["llama", *later("gpt2")])
def test_in_16_bits(name, caplog):
    model = made(name)
    for one, enabled in ((fused(model, FLOAT), True), (fused(model.bfloat16(), FLOAT), False)):
        with (
            caplog.at_level(logging.DEBUG, logger=FILE),
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
        ):
            one(IDS, labels=IDS).loss.backward()
        assert compared(one) == {True} and 1e-4 < max(differences(caplog)) < 0.03
        assert all(parameter.grad is not None for parameter in one.parameters())


def test_passes_that_compare_nothing(caplog):
    """A single token, NaN, and attention of GPUs alone."""
    mine = fused(made("llama"), FLOAT)
    mine(IDS[:, :1])
    assert compared(mine) == {False}
    mine(inputs_embeds=torch.full((1, 5, 64), torch.nan))
    assert compared(mine) == {False}
    mine.config._attn_implementation = "flash_attention_2"
    with caplog.at_level(logging.INFO, logger=FILE):
        mine.model(inputs_embeds=torch.randn(1, 5, 64))
    assert compared(mine) == {True} and "is not compared" in caplog.text


@pytest.mark.parametrize("reentrant", [*later(True), False])
def test_under_checkpointing(reentrant):
    mine = fused(made("llama"), FLOAT)
    mine.gradient_checkpointing_enable({"use_reentrant": reentrant})
    mine(IDS, labels=IDS).loss.backward()
    assert compared(mine) == {True}
