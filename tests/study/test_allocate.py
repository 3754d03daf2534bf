"""lsq.allocate: from a float model in memory to formats that convert it."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div
from torch.utils.data import DataLoader

import lsq
from lsq.study import Budget, Search
from lsq.study.allocate import predictions_of
from lsq.study.product_times import ProductTimes
from tests.ops.compare import refused
from tests.study.test_allocation import llama

FEW = Search(mixes=3)


def batches(count: int = 2) -> list[dict]:
    random = torch.Generator().manual_seed(2)
    words = [torch.randint(96, (3, 10 + one), generator=random) for one in range(count)]
    masks = [torch.ones_like(one) for one in words]
    for mask in masks:
        mask[0, 6:] = 0
    pairs = zip(words, masks, strict=True)
    return [{"input_ids": one, "attention_mask": mask} for one, mask in pairs]


def found(model, budget=4.6, **options):
    return lsq.allocate(model, batches(), budget, how=FEW, minimum_width=16, **options)


@pytest.mark.thorough
def test_a_model_is_converted_by_what_is_found(tmp_path):
    model = llama()
    logits = [model(**batch).logits.detach() for batch in batches()]
    one = found(model, at_least={"lm_head*": 8}, folder=tmp_path, held_out=batches(3)[2:])
    assert one.allocation.bits <= 4.6 * (1 + 1e-9) and one.mixes == 3
    assert one.allocation.of("weight")["lm_head.weight"] == "int8"
    assert one.held_out.keys() == {"mix"}  # at_least forbids others that fit
    assert found(model, at_least={"lm_head*": 8}, folder=tmp_path).mixes == 3  # from the files
    lsq.convert(model, one.allocation.quant, minimum_width=16)
    assert all(part.quant.coded for part in model.modules() if hasattr(part, "quant"))
    total = count = 0.0
    for batch, before in zip(batches(), logits, strict=True):
        after, mask = model(**batch).logits.detach(), batch["attention_mask"].bool()
        p, q = (x[mask].log_softmax(1) for x in (before, after))
        total += float(kl_div(q, p, reduction="sum", log_target=True))
        count += int(mask.sum())
    # activations are in int8, too, and clips of weights are measured by layer
    assert total / count == pytest.approx(one.divergence, rel=0.3)


def test_batches_of_a_loader_that_shuffles():
    rows = [{"input_ids": one} for one in torch.randint(96, (8, 5))]
    loader = DataLoader(rows, batch_size=2, shuffle=True)
    given = {"how": Search(mixes=1), "minimum_width": 16, "formats": ["int4/row"]}
    one, other = (lsq.allocate(llama(), each, 4.6, **given) for each in (list(loader), loader))
    assert other.divergence == pytest.approx(one.divergence, rel=0.1)


@pytest.mark.thorough
def test_budgets_given_together():
    model = llama()
    formats = ["int8/row", "int4/row", "int3/row"]
    loose = found(model, formats=formats, activations=True)
    most = 0.7 * loose.allocation.takes["operations"]
    tight = found(
        model, Budget(bits=4.6, operations=most), formats=formats, activations=True
    ).allocation
    assert tight.takes["operations"] <= most and tight.bits <= 4.6
    inputs = tight.of("activation")
    layer = "model.layers.0.self_attn."
    assert len({inputs[f"{layer}{one}_proj.weight"] for one in "qkv"}) == 1
    lsq.convert(model, tight.quant, minimum_width=16)
    assert model(**batches()[0]).logits.isfinite().all()


@pytest.mark.thorough
def test_milliseconds_of_this_machine(monkeypatch):
    """Times are given, so that the test does not depend on the machine."""
    asked = []

    def product_times(wanted, *, megabytes, progress):
        asked.append((wanted, megabytes))
        times = {one: 1e-6 * one.outputs * one.inputs * one.rows for one in wanted}
        times = {one: t * (2 if one.form == "int8/row" else 1) for one, t in times.items()}
        return ProductTimes(times, megabytes)

    monkeypatch.setattr(import_module("lsq.study.allocate"), "product_times", product_times)
    formats = ("int8/row", "int3/row")
    free = found(llama(), 9.0, formats=formats).allocation
    assert set(free.of("weight").values()) == {"int8/row"} and "milliseconds" not in free.takes
    most = 1.5e-6 * free.values * 4
    tight = found(llama(), Budget(milliseconds=most, rows=4), formats=formats).allocation
    assert set(tight.of("weight").values()) == set(formats)
    assert 0.8 * most < tight.takes["milliseconds"] <= most
    assert {one.rows for one in asked[0][0]} == {4} and asked[0][1] >= 1


@pytest.mark.thorough
def test_one_batch_is_no_list():
    single = batches()[0]
    one = lsq.allocate(llama(), single, 4.6, how=FEW, minimum_width=16)
    assert one == lsq.allocate(llama(), [single], 4.6, how=FEW, minimum_width=16)


def test_an_estimate_makes_the_first_mix():
    how = Search(mixes=1, rule="second")
    one = lsq.allocate(llama(), batches(), 4.6, how=how, minimum_width=16)
    assert one.allocation.rule == "second" and one.allocation.bits <= 4.6
    with refused('rule is "second", which estimates costs of weights alone'):
        lsq.allocate(llama(), batches(), 4.6, activations=True, how=how, minimum_width=16)


@pytest.mark.parametrize("given", ["dict", "tuple", "one"])
def test_how_a_model_is_called(given):
    layer = nn.Linear(5, 3)
    x = torch.randn(4, 7, 5)
    mask = torch.arange(28).view(4, 7) % 3 > 0
    batch = {"dict": {"input": x}, "tuple": (x,), "one": x}[given]
    _, count, logits = predictions_of(layer, batch)
    assert count == 28 and torch.equal(logits, layer(x).flatten(0, 1))

    class Model(nn.Module):
        def forward(self, x, attention_mask):
            return SimpleNamespace(logits=layer(x))

    class Translator(Model):
        config = SimpleNamespace(is_encoder_decoder=True)

        def forward(self, decoder_attention_mask=None, **given):
            return super().forward(**given)

    batch = {"x": x, "attention_mask": mask.long()}  # of the words that the encoder reads
    assert predictions_of(Translator(), batch)[1] == 28
    batch |= {"decoder_attention_mask": ~mask}
    assert predictions_of(Translator(), batch)[1] == 28 - int(mask.sum())
    loss, count, logits = predictions_of(Model(), {"x": x, "attention_mask": mask.long()})
    assert count == int(mask.sum()) and torch.equal(logits, layer(x)[mask])
    assert loss.item() == pytest.approx(-logits.log_softmax(1).amax(1).sum().item(), rel=1e-6)


def test_what_is_refused():
    with refused("a budget is bits=-1.0; it must be a number above 0"):
        found(llama(), -1.0)
    with refused("the formats take .* bits of a value or .* bytes at least"):
        found(llama(), 1.0)
    for given in ("4", True):
        with refused(f"a budget is bits={given!r}; it must be a number above 0"):
            Budget(bits=given)
    with refused("rows is True; it must be a whole number above 0"):
        Budget(bits=4, rows=True)
    with pytest.raises(TypeError, match="the model returns tuple; it must return logits"):
        predictions_of(nn.LSTM(4, 4), torch.randn(2, 3, 4))
