"""search: measured mixes keep to the budget and are no worse; a stopped search ends alike."""

import copy
import itertools
import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

from lsq.quant.declared import declare
from lsq.quant.numbers import scaled_format
from lsq.study import Allocator, Budget, Groups, KeptMixes, Search, search, sensitivity
from lsq.study.products import inputs_replaced
from tests.layers.test_clip_format import forgotten
from tests.ops.compare import refused
from tests.study.models import Layers, word_batches, word_loss

module = import_module("lsq.study.search")
FORMATS = ("int6/row", "int4/row", "int2/row")
GROUPS = (("attention.in_proj_weight", "attention.out_proj.weight"), ("across",), ("back.weight",))
BITS = 4.6


def loss(model, batch):
    return *word_loss(model, batch), model(batch[0]).flatten(0, 1)


@pytest.fixture(scope="module")
def found():
    """A model and an allocator with its costs."""
    torch.manual_seed(3)
    model = Layers()
    with torch.no_grad():
        model.get_parameter("back.weight").mul_(4)  # so that formats matter
    costs = sensitivity(model, loss, word_batches(), formats=FORMATS, activations=False)
    return model, Allocator(costs=costs, groups=Groups(weights=GROUPS, inputs=()))


def searched(found, bits=BITS, mixes=400, **options):
    model, allocator = found
    how = Search(mixes=mixes)
    return search(allocator, Budget(bits=bits), model, loss, word_batches(), how=how, **options)


@torch.no_grad()
def rounded(model: nn.Module, formats: dict[str, str]) -> nn.Module:
    """A copy whose weights are rounded."""
    other = copy.deepcopy(model).eval()
    for name, form in formats.items():
        weight, how = other.get_parameter(name).data, scaled_format(form)
        rows = weight.t() if name == "across" else weight
        rounded = how.decode(how.encode(rows.contiguous(), "mse"))
        weight.copy_(rounded.t() if name == "across" else rounded)
    return other


@torch.no_grad()
def divergence_of(model: nn.Module, formats: dict[str, str], batches=None) -> float:
    """The divergence of a copy whose weights are rounded, in float64."""
    p, q = (
        torch.cat(
            [one(t).flatten(0, 1).double().log_softmax(1) for t, _ in batches or word_batches()]
        )
        for one in (copy.deepcopy(model).eval(), rounded(model, formats))
    )
    return (p.exp() * (p - q)).sum(1).mean().item()


def formats_of(allocation) -> dict[str, str]:
    return allocation.of("weight")


def test_the_divergence_is_that_of_the_rounded_model(found):
    model, allocator = found
    before = copy.deepcopy(model.state_dict())
    refined = searched(found)
    assert refined.allocation.bits <= BITS * (1 + 1e-9)
    expected = divergence_of(model, formats_of(refined.allocation))
    assert refined.divergence == pytest.approx(expected, rel=1e-3)
    begun = divergence_of(model, formats_of(allocator.run(Budget(bits=BITS))))
    assert refined.first == pytest.approx(begun, rel=1e-3)
    assert refined.divergence <= refined.first and refined.mixes > 3
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name


def test_it_comes_near_the_best_of_all_mixes(found):
    model, allocator = found
    (problem, _), every = allocator.solved(Budget(bits=BITS)), []
    for mix in itertools.product(range(len(FORMATS)), repeat=len(GROUPS)):
        if problem.fits(mix):
            every.append(divergence_of(model, formats_of(allocator.allocation(problem, mix))))
    assert searched(found).divergence <= sorted(every)[1] * (1 + 1e-3)


def test_a_stopped_search_ends_alike(found, tmp_path):
    path, whole = tmp_path / "mixes.json", searched(found)

    def stop(mixes: int, least: float) -> None:
        if mixes == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(found, keep=KeptMixes(path=path, progress=stop))
    assert len(json.loads(path.read_text())["mixes"]) == 4
    counts = []
    keep = KeptMixes(path=path, progress=lambda mixes, least: counts.append(mixes))
    assert searched(found, keep=keep) == whole
    assert counts == list(range(5, whole.mixes + 1))
    assert searched(found, keep=keep) == whole and len(counts) == whole.mixes - 4


def test_a_search_of_many_units_goes_on(tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    batches = [torch.randn(3, 4)]

    def loss(model, x):
        return model(x).square().sum(), 3.0, model(x)

    costs = sensitivity(model, loss, batches, formats=FORMATS, activations=False)
    allocator, keep = Allocator(costs=costs), KeptMixes(path=tmp_path / "mixes.json")
    given = allocator, Budget(bits=15), model, loss, batches
    one, other = (search(*given, how=Search(mixes=3), keep=keep) for _ in range(2))
    assert one == other and one.mixes == 3


def test_every_mix_is_rounded_from_the_floats(found, tmp_path):
    model, allocator = found
    path = tmp_path / "mixes.json"
    searched(found, keep=KeptMixes(path=path))
    for mix in json.loads(path.read_text())["mixes"]:
        forms = mix["formats"].split(",")
        names = {n: form for group, form in zip(GROUPS, forms, strict=True) for n in group}
        expected = divergence_of(model, names)
        assert mix["divergence"] == pytest.approx(expected, rel=1e-3), mix


def test_activations_are_measured_with_the_weights():
    torch.manual_seed(3)
    model = Layers()
    costs = sensitivity(model, loss, word_batches(), formats=FORMATS)
    allocator = Allocator(costs=costs, activations=True)
    budget = Budget(
        bits=4.5, operations=allocator.uniform()["int4/row int4/row"].takes["operations"]
    )
    one = search(allocator, budget, model, loss, word_batches(), how=Search(mixes=1))
    assert one.allocation.fits(budget) and one.divergence == one.first

    def replaced(name, x, transposed):
        form = one.allocation.of("activation").get(name)
        how = form and scaled_format(form)
        return x if form is None else how.decode(how.encode(x))

    batches, other = word_batches(), rounded(model, one.allocation.of("weight"))
    own = {name: other.get_parameter(name) for name in one.allocation.of("weight")}
    with torch.no_grad(), inputs_replaced(own, replaced):
        logits = torch.cat([other(t).flatten(0, 1) for t, _ in batches]).double().log_softmax(1)
    p = torch.cat([copy.deepcopy(model).eval()(t).flatten(0, 1) for t, _ in batches])
    p = p.detach().double().log_softmax(1)
    expected = (p.exp() * (p - logits)).sum(1).mean().item()
    assert one.divergence == pytest.approx(expected, rel=1e-3)


def test_a_mix_that_loses_more_on_held_out_batches_is_not_taken(found, monkeypatch):
    model, allocator = found
    batches = word_batches(4)
    fair = searched(found, held_out=batches)
    forms = {"mix": formats_of(fair.allocation)}
    names = [name for group in GROUPS for name in group]
    forms |= {form: dict.fromkeys(names, form) for form in ("int2/row",)}
    assert fair.held_out.keys() == forms.keys()  # others do not fit
    for name, formats in forms.items():
        expected = divergence_of(model, formats, batches)
        assert fair.held_out[name] == pytest.approx(expected, rel=1e-3)

    real = module.divergence_of

    measures = []

    def worse_there(measure, allocation):
        """The second function measures on what is held out."""
        measures.extend([measure] * (measure not in measures))
        mixed = len(set(allocation.of("weight").values())) > 1
        return real(measure, allocation) + 10.0 * (mixed and len(measures) == 2)

    monkeypatch.setattr(module, "divergence_of", worse_there)
    unlucky = searched(found, held_out=batches)
    assert set(formats_of(unlucky.allocation).values()) == {"int2/row"}
    measures.clear()
    strict = replace(allocator, at_least={"back*": 4})
    kept = searched((model, strict), held_out=batches)
    assert kept.held_out.keys() == {"mix"}
    assert formats_of(kept.allocation)["back.weight"] == "int4/row"


def test_autocast_casts_rounded_weights_anew(found):
    model, words = copy.deepcopy(found[0]).eval(), word_batches()[0][0]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before = model(words)
        one = searched((model, found[1]), mixes=1)
        assert torch.equal(model(words), before)
    expected = divergence_of(model, formats_of(one.allocation))
    assert one.divergence == pytest.approx(expected, rel=0.1)


def test_weights_are_restored_when_a_signal_comes_in_a_copy(found, monkeypatch):
    model, before, copies = found[0], copy.deepcopy(found[0].state_dict()), []

    def interrupted(to, values, real=torch.Tensor.copy_):
        real(to, values)
        copies.append(to)
        if len(copies) == 2:  # of the rounded weight
            raise KeyboardInterrupt
        return to

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        searched(found)
    monkeypatch.undo()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_predictions_that_are_not_finite(found):
    model, allocator = found

    def padded(model, batch, value):
        total, count, logits = loss(model, batch)
        return total, count, nn.functional.pad(logits, (0, 3), value=value)

    plain, ruled_out = (
        search(
            *(allocator, Budget(bits=BITS), model, each, word_batches()), how=Search(mixes=4)
        ).divergence
        for each in (loss, lambda *given: padded(*given, -math.inf))
    )
    assert ruled_out == pytest.approx(plain, rel=1e-4)
    with refused("predictions are not finite with any of 1 mixes"):
        none = lambda *given: padded(*given, math.nan)  # noqa: E731
        given = allocator, Budget(bits=BITS), model, none, word_batches()
        search(*given, how=Search(mixes=1))


def test_few_mixes(found):
    one = searched(found, mixes=1)
    assert one.mixes == 1 and one.divergence == one.first
    few = searched(found, mixes=5)
    assert few.mixes == 5 and few.divergence <= one.divergence


def test_what_is_refused(found, tmp_path):
    model, allocator = found
    with refused("0 mixes shall be measured; give 1 at least"):
        searched(found, mixes=0)
    with refused("method is 'hope'; allowed: 'refine'"):
        Search(method="hope")
    with refused("seed is -1; it must be 0 or more"):
        Search(seed=-1)
    budget = Budget(bits=BITS)
    with refused("the loss returns no logits"):
        search(allocator, budget, model, word_loss, word_batches())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("across").add_(1)
    with refused("the model has other weights than those"):
        search(allocator, budget, other, loss, word_batches())
    path = tmp_path / "mixes.json"
    searched(found, mixes=1, keep=KeptMixes(path=path, about={"text": "a"}))
    with refused("about is .*choose another file, or delete it"):
        searched(found, keep=KeptMixes(path=path, about={"text": "b"}))
    with refused("loss is .*choose another file, or delete it"):
        other = [(words.flip(0), labels) for words, labels in word_batches()]
        how, keep = Search(mixes=1), KeptMixes(path=path, about={"text": "a"})
        search(allocator, budget, model, loss, other, how=how, keep=keep)
    with refused("clip is 'mse'; now it is 'absmax'"):
        costs = replace(allocator.costs, clip="absmax")
        searched((model, replace(allocator, costs=costs)), mixes=1, keep=keep)
    path.write_text(path.read_text().replace('"divergence": ', '"divergence": "x", "y": '))
    with refused("mixes.0. has the unknown field"):
        searched(found, keep=KeptMixes(path=path, about={"text": "a"}))


def test_numbers_of_other_values_are_refused(found):
    model, allocator = found
    declare("ours", (-1, 0, 2))
    costs = sensitivity(model, loss, word_batches(), formats=["ours/row"], activations=False)
    forgotten("ours")
    declare("ours", (-1, 0, 3))
    with refused("ours had other values when the costs were measured, or is not declared now"):
        search(Allocator(costs=costs), Budget(bits=4), model, loss, word_batches())
    forgotten("ours")
    with refused("ours had other values .* declare it as it was .--import., or measure again"):
        search(Allocator(costs=costs), Budget(bits=4), model, loss, word_batches())
