import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import lsq
from lsq.quant.declared import declare
from lsq.quant.numbers import scaled_format
from lsq.study import Keep, estimate, read_costs, sensitivity
from lsq.study.costs import TensorCosts, write_costs
from lsq.study.sensitivity import Rounding, Trial
from tests.layers.test_clip_format import forgotten
from tests.ops.compare import refused
from tests.study.models import (
    Layers,
    Quadratic,
    quadratic_loss,
    quadratic_samples,
    word_batches,
    word_loss,
)

FORMATS = ("int4/group16", "int3/row")


def by_name(costs, kind: str) -> dict[str, TensorCosts]:
    return {tensor.name: tensor for tensor in costs.of(kind)}


@torch.no_grad()
def loss_of(model: nn.Module, batches) -> float:
    found = [word_loss(model.eval(), batch) for batch in batches]
    return sum(float(total) for total, _ in found) / sum(count for _, count in found)


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_estimate_is_exact_where_the_curvature_is_the_fisher_information(slope):
    samples = quadratic_samples(slope)
    costs = sensitivity(Quadratic(), quadratic_loss, samples, formats=FORMATS)
    for tensor in (by_name(costs, "weight")["shift"], by_name(costs, "activation")["same.weight"]):
        for cost in tensor.formats.values():
            assert cost.cost == pytest.approx(cost.first + cost.second, rel=1e-4)
            assert cost.second > 1e-4
            assert abs(cost.first) > 1e-4 if slope else abs(cost.first) < 1e-3 * cost.second
    for kind in ("weight", "activation"):  # a layer that does nothing costs nothing
        for cost in by_name(costs, kind)["idle.weight"].formats.values():
            assert (cost.cost, cost.first, cost.second) == (0.0, 0.0, 0.0)
            assert 0 < cost.error < 1


def test_the_divergence_is_that_from_the_models_own_predictions():
    """Against a model with the other weight, in float64: a mean over the words of all batches."""
    model, batches = Layers().eval(), word_batches()

    def loss(model, batch):
        total, count = word_loss(model, batch)
        return total, count, model(batch[0]).flatten(0, 1)

    costs = sensitivity(model, loss, batches, formats=["int2/row"], clip="absmax")
    tensors = by_name(costs, "weight")
    other, how = copy.deepcopy(model), scaled_format("int2/row")
    weight = other.get_parameter("attention.out_proj.weight").data
    weight.copy_(how.decode(how.encode(weight)))
    with torch.no_grad():
        p, q = (
            torch.cat([one(tokens).flatten(0, 1).double().log_softmax(1) for tokens, _ in batches])
            for one in (model, other)
        )
    expected = (p.exp() * (p - q)).sum(1).mean().item()
    found = tensors["attention.out_proj.weight"].formats["int2/row"].divergence
    assert found == pytest.approx(expected, rel=1e-4) and expected > 1e-4
    assert all(
        one.formats["int2/row"].divergence > 0 for one in by_name(costs, "activation").values()
    )


def test_the_divergence_of_a_model_whose_products_are_not_seen():
    """A matmul here; lsq's own layers are not seen either."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 7, generator=torch.Generator()))

        def forward(self, x):
            return torch.matmul(x, self.weight)

    def loss(model, x):
        return model(x).square().sum(), float(len(x)), model(x)

    model, x = Model(), torch.randn(5, 24)
    costs = sensitivity(model, loss, [x], formats=["int2/row"], clip="absmax", activations=False)
    how = scaled_format("int2/row")
    with torch.no_grad():
        p, q = (
            torch.matmul(x, weight).double().log_softmax(1)
            for weight in (model.weight, how.decode(how.encode(model.weight)))
        )
    expected = (p.exp() * (p - q)).sum(1).mean().item()
    (tensor,) = costs.tensors
    found = tensor.formats["int2/row"].divergence
    assert found == pytest.approx(expected, rel=1e-4) and expected > 1e-3


def test_no_divergence_is_measured_without_predictions():
    costs = sensitivity(
        Layers(), word_loss, word_batches(), formats=["int4/row"], activations=False
    )
    assert {one.formats["int4/row"].divergence for one in costs.tensors} == {None}


def test_predictions_of_the_first_batches_alone_are_kept(monkeypatch):
    def loss(model, batch):
        return *word_loss(model, batch), model(batch[0]).flatten(0, 1)

    def found() -> float:
        options = {"formats": ["int2/row"], "tensors": ["across"], "activations": False}
        (tensor,) = sensitivity(Layers(), loss, word_batches(), **options).tensors
        return tensor.formats["int2/row"].divergence

    torch.manual_seed(1)
    every = found()
    monkeypatch.setattr(sys.modules[sensitivity.__module__], "LARGEST_PREDICTIONS", 1)
    torch.manual_seed(1)
    assert 0 < found() != every


def test_estimate_needs_samples_by_themselves():
    """Gradients that cancel say nothing about the curvature once they are added."""
    pair = quadratic_samples(0.0)

    def loss(model, batch):
        parts = [quadratic_loss(model, sample) for sample in batch]
        return sum(total for total, _ in parts), sum(count for _, count in parts)

    def cost_of_shift(samples):
        costs = sensitivity(Quadratic(), loss, [pair], samples=samples, formats=["int3/row"])
        return by_name(costs, "weight")["shift"].formats["int3/row"]

    cost, known = cost_of_shift(None), cost_of_shift([pair[:1], pair[1:]])
    assert cost.second < 1e-6 * cost.cost and known.second == pytest.approx(cost.cost, rel=1e-4)


def test_costs_are_those_of_a_model_with_the_other_weight():
    """A weight [K, N] is cut along its columns; a tied one counts once."""
    model, batches = Layers(), word_batches()
    options = {"formats": FORMATS, "clip": "absmax", "activations": False}
    costs = sensitivity(model, word_loss, batches, **options)
    names = "table.weight attention.in_proj_weight attention.out_proj.weight across back.weight"
    assert set(by_name(costs, "weight")) == set(names.split())
    for name, tensor in by_name(costs, "weight").items():
        assert tensor.transposed == (name == "across")
        for form, cost in tensor.formats.items():
            other, how = copy.deepcopy(model), scaled_format(form)
            weight = other.get_parameter(name).data
            matrix = weight.t().contiguous() if tensor.transposed else weight
            rounded = how.decode(how.encode(matrix))
            assert cost.bits == how.bits_per_value(matrix.shape)
            error = float((rounded - matrix).square().sum() / matrix.square().sum())
            assert cost.error == pytest.approx(error)
            weight.copy_(rounded.t() if tensor.transposed else rounded)
            expected = loss_of(other, batches) - loss_of(model, batches)
            assert cost.cost == pytest.approx(expected, abs=1e-6)
    assert costs.loss == pytest.approx(loss_of(model, batches), abs=1e-6)


@torch.no_grad()
def test_costs_of_activations_are_those_of_a_model_that_rounds_them():
    model, batches = Layers(), word_batches()
    costs = sensitivity(model, word_loss, batches, formats=FORMATS)
    read = by_name(costs, "activation")
    assert set(read) == set(by_name(costs, "weight"))
    assert read["back.weight"].values == sum(tokens.numel() for tokens, _ in batches) * 40
    how = scaled_format("int3/row")
    rounded = lambda module, given: how.decode(how.encode(given[0]))  # noqa: E731
    model.eval().back.register_forward_pre_hook(rounded)
    cost = read["back.weight"].formats["int3/row"].cost
    assert cost == pytest.approx(loss_of(model, batches) - costs.loss, abs=1e-6)


def test_the_model_is_left_as_it_was():
    """Bit by bit, also where it stops in the middle."""
    for stop_at in (None, 1, 4, 6, 13, 31):
        model, calls = Layers().train(), 0
        model.attention.eval()
        model.back.weight.requires_grad_(False)
        model.across.grad = torch.ones_like(model.across)
        with torch.no_grad():
            model.across[0, :2] = torch.tensor([-0.0, 1e-42])
        before = {name: one.view(torch.int32).clone() for name, one in model.state_dict().items()}

        def loss(model, batch, stop_at=stop_at):
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise KeyboardInterrupt
            return word_loss(model, batch)

        linear, addmm, state = functional.linear, torch.addmm, torch.get_rng_state()
        try:
            sensitivity(model, loss, word_batches(), formats=FORMATS)
        except KeyboardInterrupt:
            assert stop_at is not None
        assert stop_at is None or calls == stop_at
        for name, one in model.state_dict().items():
            assert torch.equal(one.view(torch.int32), before[name])
        assert (functional.linear, torch.addmm) == (linear, addmm)
        assert torch.equal(torch.get_rng_state(), state)
        modules = (model, model.attention, model.attention.out_proj)
        assert [module.training for module in modules] == [True, False, False]
        assert [one.requires_grad for one in (model.back.weight, model.across)] == [False, True]
        assert torch.equal(model.across.grad, torch.ones_like(model.across))
        assert model.table.weight.grad is None


def test_a_stopped_measurement_goes_on(tmp_path):
    path, batches = tmp_path / "costs.json", word_batches()
    keep = Keep(about={"text": "words"})
    whole = sensitivity(Layers(), word_loss, batches, formats=FORMATS, keep=keep)
    assert whole.finished

    class Stop(Exception):
        pass

    def stopping(done, wanted, name):
        assert wanted == 10
        if done == 3:
            raise Stop

    def again(progress):
        keep = Keep(about={"text": "words"}, path=path, progress=progress)
        return sensitivity(Layers(), word_loss, batches, formats=FORMATS, keep=keep)

    with pytest.raises(Stop):
        again(stopping)
    partial = read_costs(path)
    assert len(partial.tensors) == 3 and not partial.finished
    for measured in (list(range(4, 11)), []):
        done = []
        assert again(lambda *given, done=done: done.append(given[0])) == whole
        assert done == measured and read_costs(path) == whole


def test_a_file_of_other_settings_is_refused(tmp_path):
    """Its activations are neither given nor lost without being asked for."""
    path, batches = tmp_path / "costs.json", word_batches()
    given = {"formats": ["int3/row"], "keep": Keep(path=path), "tensors": ["back*", "across"]}
    floats = {**given, "activations": False}
    assert not sensitivity(Layers(), word_loss, batches, **floats).of("activation")
    content, other = path.read_bytes(), Layers()
    with torch.no_grad():
        other.across[3, 4] += 1
    for model, more, named in (
        (Layers(), {"clip": "absmax"}, "clip: mse before, absmax now"),
        (Layers(), {"formats": ("int8/row",)}, "formats: "),
        (Layers(), {"keep": Keep(path=path, about={"text": "others"})}, "about: {} before"),
        (other, {}, "weights: "),
    ):
        with pytest.raises(ValueError, match=named):
            sensitivity(model, word_loss, batches, **{**floats, **more})
    assert path.read_bytes() == content
    assert sensitivity(Layers(), word_loss, batches, **given).of("activation")
    content = path.read_bytes()
    message = "the activation of .*, which is not measured now; measure it"
    with pytest.raises(ValueError, match=message):
        sensitivity(Layers(), word_loss, batches, **floats)
    assert path.read_bytes() == content


def test_half_precision_patterns_and_losses_that_are_not_finite():
    model, forms = Layers().to(torch.bfloat16), ["int8/row", "int2/row"]
    options = {"formats": forms, "tensors": ["back*", "acr?ss"]}
    costs = sensitivity(model, word_loss, word_batches(), **options)
    for kind in ("weight", "activation"):
        assert set(by_name(costs, kind)) == {"back.weight", "across"}
    found = by_name(costs, "weight")["back.weight"].formats
    assert found["int2/row"].error > 100 * found["int8/row"].error > 0

    def loss(model, batch):  # divides by values that the rounding moves to zero
        return (1 / model.weight).sum(), 1.0

    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 1e-3], [2.0, 3.0]])
    costs = sensitivity(model, loss, [None], formats=["int2/row"])
    assert costs.tensors[0].formats["int2/row"].cost is None


def test_costs_are_the_same_in_inference_mode():
    model, samples = Quadratic(), quadratic_samples(1.0)
    one = sensitivity(model, quadratic_loss, samples, formats=FORMATS)
    with torch.inference_mode():
        assert sensitivity(model, quadratic_loss, samples, formats=FORMATS) == one


def test_what_cannot_be_measured_is_refused():
    for given, named in (
        ({"formats": ["int9/row"]}, "did you mean"),
        ({"formats": []}, "no formats"),
        ({"clip": "mean"}, "clip is 'mean'; allowed: 'absmax'"),
        ({"tensors": ["nothing*"]}, "no tensor is called 'nothing\\*'"),
        ({"batches": []}, "no losses"),
    ):
        with pytest.raises(ValueError, match=named):
            sensitivity(Layers(), word_loss, **{"batches": word_batches(), **given})

    def restless(model, batch):
        total, count = word_loss(model, batch)
        return total * (1 + torch.rand(())), count

    with pytest.raises(ValueError, match="make the loss deterministic"):
        sensitivity(Layers(), restless, word_batches())
    with pytest.raises(ValueError, match="Dropout has no float parameter"):
        sensitivity(nn.Dropout(), word_loss, word_batches())
    model = Layers()
    with torch.no_grad():
        model.back.bias[0] = torch.inf
    with pytest.raises(ValueError, match="loss of nan|loss of inf"):
        sensitivity(model, word_loss, word_batches())
    with torch.no_grad():
        model.back.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="back.weight holds infinities or NaN"):
        sensitivity(model, word_loss, word_batches())


def test_a_file_is_of_the_values_that_a_user_declared(tmp_path):
    """Not of others under the same name."""
    keep, samples = Keep(path=tmp_path / "costs.json"), quadratic_samples(0.0)

    def measured(*values: float):
        declare("three", values)
        torch.manual_seed(0)
        found = sensitivity(Quadratic(), quadratic_loss, samples, formats=["three/row"], keep=keep)
        forgotten("three")
        return found

    first = measured(-1, 0, 1)
    assert measured(-1, 0, 1) == first == read_costs(keep.path)
    assert first.about == {"numbers": {"three": [-1, 0, 1]}}
    with pytest.raises(ValueError, match=r"'three': \[-1.0, 0.0, 1.0\]}} before, .* 2.0\]}} now"):
        measured(-1, 0, 2)


def test_an_estimate_is_half_of_the_fisher_information_times_squared_changes():
    """The exact information is an expectation over all labels, in float64."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))
    x = torch.randn(7, 6)

    def loss(model, rows):
        logits = model(rows)
        return logits.sum() * 0, float(len(rows)), logits

    before = copy.deepcopy(model.state_dict())
    found = estimate(model, loss, [x] * 500, formats=["int3/row", "int4"])
    names = [name for name, one in model.named_parameters() if one.dim() == 2]
    fisher = dict.fromkeys(names, 0.0)
    other = copy.deepcopy(model).double()
    for row in x.double():
        likely = other(row).log_softmax(0)
        for label in range(4):
            gradients = torch.autograd.grad(
                likely[label], [other.get_parameter(name) for name in names], retain_graph=True
            )
            for name, gradient in zip(names, gradients, strict=True):
                fisher[name] = fisher[name] + likely[label].exp().detach() * gradient.square()
    assert [one.name for one in found.tensors] == names and found.finished
    for tensor in found.tensors:
        weight, how = before[tensor.name], scaled_format("int3/row")
        change = (how.decode(how.encode(weight, "mse")) - weight).double()
        expected = (fisher[tensor.name] * change.square()).sum().item() / 2 / len(x)
        cost = tensor.formats["int3/row"]
        assert cost.second == pytest.approx(expected, rel=0.1)
        assert cost.cost is None and cost.divergence is None
        assert tensor.rows == 7 * 500
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name])
    with refused("the loss returns no logits, from which labels are drawn"):
        estimate(model, lambda model, rows: loss(model, rows)[:2], [x])


def test_int8_and_int4_are_those_of_converted_models():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    x = torch.randn(9, 128)
    trial = Trial(
        model=model,
        loss=lambda model, rows: (model(rows).sum(), 9.0, model(rows)),
        batches=[x],
        weights=dict(model.named_parameters()),
        rounding={name: Rounding.of(name, "mse") for name in ("int8", "int4")},
    )
    for form in ("int8", "int4"):
        rounded = trial.rounding[form].weight(model[0].weight, False)
        other = copy.deepcopy(model)
        lsq.convert(other, lsq.QuantConfig(weight_format=form, clips="learned"))
        coded = other.eval()(torch.eye(128)).t().detach()
        weight = model[0].weight.detach()
        error = (coded - weight).norm().item()  # clips are found in other ways
        assert (rounded - weight).norm().item() == pytest.approx(error, rel=0.03)
    bits = trial.rounding["int4"].bits(model[0].weight, False)
    assert bits == 8 * 17 / 32 + 32 / 128
    with refused("activations cannot be in int4: measure weights only"):
        sensitivity(model, trial.loss, [x], formats=["int4"])


def test_a_measurement_does_not_go_on_with_an_estimate(tmp_path):
    model, x = Quadratic(), torch.randn(3, 40)
    loss = lambda model, x: (model(x).sum(), 3.0, model(x))  # noqa: E731
    path = tmp_path / "sensitivity.json"
    write_costs(path, estimate(model, loss, [x], formats=FORMATS))
    with refused("is of other settings .about: {'estimated': True} before, {} now"):
        sensitivity(model, loss, [x], formats=FORMATS, keep=Keep(path=path))
