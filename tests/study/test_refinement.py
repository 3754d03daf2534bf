"""refine: measured mixes keep to the budget and are no worse; a stopped search ends alike."""

import copy
import itertools
import json

import pytest
import torch
from torch import nn

from lsq.quant.numbers import scaled_format
from lsq.study import Allocator, KeptMixes, refine, sensitivity
from tests.ops.compare import refused
from tests.study.models import Layers, word_batches, word_loss

FORMATS = ("int6/row", "int4/row", "int2/row")
GROUPS = [("attention.in_proj_weight", "attention.out_proj.weight"), ("across",), ("back.weight",)]
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
    return model, Allocator(costs=costs, groups=GROUPS)


def search(found, bits=BITS, **options):
    model, allocator = found
    return refine(allocator, model, loss, word_batches(), bits=bits, **options)


@torch.no_grad()
def divergence_of(model: nn.Module, formats: dict[str, str]) -> float:
    """The divergence of a copy whose weights are rounded, in float64."""
    other = copy.deepcopy(model).eval()
    for name, form in formats.items():
        weight, how = other.get_parameter(name).data, scaled_format(form)
        rows = weight.t() if name == "across" else weight
        rounded = how.decode(how.encode(rows.contiguous(), "mse"))
        weight.copy_(rounded.t() if name == "across" else rounded)
    p, q = (
        torch.cat([one(t).flatten(0, 1).double().log_softmax(1) for t, _ in word_batches()])
        for one in (copy.deepcopy(model).eval(), other)
    )
    return (p.exp() * (p - q)).sum(1).mean().item()


def formats_of(allocation) -> dict[str, str]:
    return {name: one.format for one in allocation.chosen for name in one.names}


def test_the_divergence_is_that_of_the_rounded_model(found):
    model, allocator = found
    before = copy.deepcopy(model.state_dict())
    refined = search(found)
    assert refined.allocation.bits <= BITS * (1 + 1e-9)
    expected = divergence_of(model, formats_of(refined.allocation))
    assert refined.divergence == pytest.approx(expected, rel=1e-3)
    begun = divergence_of(model, formats_of(allocator.run(bits=BITS)))
    assert refined.begun == pytest.approx(begun, rel=1e-3)
    assert refined.divergence <= refined.begun and refined.mixes > 3
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name


def test_it_comes_near_the_best_of_all_mixes(found):
    model, allocator = found
    problem, every = allocator.problem(allocator.limit(bits=BITS)), []
    for mix in itertools.product(range(len(FORMATS)), repeat=len(GROUPS)):
        if problem.fits(mix):
            every.append(divergence_of(model, formats_of(allocator.allocation(mix))))
    assert search(found).divergence <= sorted(every)[1] * (1 + 1e-3)


def test_a_stopped_search_ends_alike(found, tmp_path):
    path, whole = tmp_path / "mixes.json", search(found)

    def stop(mixes: int, least: float) -> None:
        if mixes == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(found, keep=KeptMixes(path=path, progress=stop))
    assert len(json.loads(path.read_text())["mixes"]) == 4
    counts = []
    keep = KeptMixes(path=path, progress=lambda mixes, least: counts.append(mixes))
    assert search(found, keep=keep) == whole
    assert counts == list(range(5, whole.mixes + 1))
    assert search(found, keep=keep) == whole and len(counts) == whole.mixes - 4


def test_every_mix_is_rounded_from_the_floats(found, tmp_path):
    model, allocator = found
    path = tmp_path / "mixes.json"
    search(found, keep=KeptMixes(path=path))
    for mix in json.loads(path.read_text())["mixes"]:
        forms = mix["formats"].split(",")
        names = {n: form for group, form in zip(GROUPS, forms, strict=True) for n in group}
        expected = divergence_of(model, names)
        assert mix["divergence"] == pytest.approx(expected, rel=1e-3), mix


def test_few_mixes(found):
    one = search(found, mixes=1)
    assert one.mixes == 1 and one.divergence == one.begun
    few = search(found, mixes=5)
    assert few.mixes == 5 and few.divergence <= one.divergence


def test_what_is_refused(found, tmp_path):
    model, allocator = found
    with refused("0 mixes shall be measured; give 1 at least"):
        search(found, mixes=0)
    with refused("there is no budget"):
        refine(allocator, model, loss, word_batches())
    with refused("the loss returns no logits"):
        refine(allocator, model, word_loss, word_batches(), bits=BITS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("across").add_(1)
    with refused("the model has other weights than those"):
        refine(allocator, other, loss, word_batches(), bits=BITS)
    path = tmp_path / "mixes.json"
    search(found, mixes=1, keep=KeptMixes(path=path, about={"text": "a"}))
    with refused("about is .*choose another file, or delete it"):
        search(found, keep=KeptMixes(path=path, about={"text": "b"}))
    path.write_text(path.read_text().replace('"divergence": ', '"divergence": "x", "y": '))
    with refused("mixes.0. has the unknown field"):
        search(found, keep=KeptMixes(path=path, about={"text": "a"}))
