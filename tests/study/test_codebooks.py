"""train_codebooks: k-means, gradients of entries against differences, and what is kept."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div

import lsq
from lsq.models import declare_formats
from lsq.quant.declared import declare
from lsq.quant.numbers import NUMBER_FORMATS, scaled_format
from lsq.study import codebooks, train_codebooks
from tests.layers.test_clip_format import forgotten
from tests.ops.compare import refused
from tests.study.models import Layers, word_batches, word_loss

RESTS = ("row", "group5/bfloat16", "tensor", "channel")


def loss(model: nn.Module, batch) -> tuple[torch.Tensor, float, torch.Tensor]:
    return *word_loss(model, batch), model(batch[0]).flatten(0, 1)


def turned(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight [K, N] of Layers as rows, and back."""
    return weight.t().contiguous() if name == "across" else weight


def divergence(model: nn.Module, other: nn.Module, batch) -> float:
    with torch.no_grad():
        q, p = (one(batch[0]).double().flatten(0, 1).log_softmax(1) for one in (other, model))
    return kl_div(q, p, reduction="batchmean", log_target=True).item()


def test_kmeans_finds_clusters():
    """Between -1 and 1, which stay."""
    centres, spread = torch.tensor([-1.0, -0.1, 0.3, 1.0]), torch.tensor([-0.01, 0.0, 0.01])
    steps = (centres[:, None] + spread).clamp(-1, 1)
    part = codebooks._Part(number="one", transposed=False, scale=torch.ones(4, 1), steps=steps)
    found = codebooks._kmeans([part, part], 4)
    torch.testing.assert_close(found, centres.double(), rtol=0, atol=1e-6)
    # no value lies nearer to two of them
    assert codebooks._kmeans([part], 16)[[0, -1]].tolist() == [-1, 1]


@pytest.mark.parametrize("bits", [2, 4])
def test_kmeans_errs_less_than_even_steps(bits):
    torch.manual_seed(bits)
    model = Layers()
    rounded = train_codebooks(
        model, loss, word_batches(), {"*": "mine/group12"}, bits=bits, updates=0
    )
    even = declare("even", torch.linspace(-1, 1, 2**bits))
    errors = {"mine": 0.0, "even": 0.0}
    for name, weight in model.state_dict().items():
        if name in rounded:
            form = scaled_format(f"{even.name}/group12")
            found = turned(name, form.decode(form.encode(turned(name, weight))))
            errors["even"] += float((found - weight).square().sum())
            errors["mine"] += float((rounded[name] - weight).square().sum())
    assert 0 < errors["mine"] < 0.97 * errors["even"]


class Recorder(torch.optim.Adam):
    """Adam that keeps entries and their gradients."""

    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def step(self, closure=None):
        given = self.param_groups[0]["params"]
        self.seen.append([(one.detach().clone(), one.grad.clone()) for one in given])
        return super().step(closure)


@pytest.mark.parametrize("rest", RESTS)
def test_gradients_of_entries_are_differences_of_divergences(rest, monkeypatch):
    """Of two codebooks, one shared, while codes stay; the ends of both do not move."""
    model, batches = Layers().eval(), word_batches()
    monkeypatch.setattr(torch.optim, "Adam", Recorder)
    monkeypatch.setattr(Recorder, "seen", [])
    formats = {"*": f"many/{rest}", "across": f"alone/{rest}"}
    train_codebooks(model, loss, batches, formats, bits=3, updates=3)
    assert len(Recorder.seen) == 3

    first = [entries for entries, _ in Recorder.seen[0]]

    def found(entries: list[torch.Tensor], batch) -> float:
        other = copy.deepcopy(model).double()
        for name, weight in other.named_parameters():
            if weight.dim() > 1:
                own = int(name != "across")  # the first parameter of all
                begun = declare(f"begun{own}{rest.replace('/', '')}", first[own])
                form, rows = scaled_format(f"{begun.name}/{rest}"), turned(name, weight.data)
                encoded = form.encode(rows)
                scale = form.grain.spread(form.scales.decode(encoded.scales), tuple(rows.shape))
                weight.data.copy_(turned(name, entries[own][encoded.codes.long()] * scale))
        return divergence(copy.deepcopy(model).double(), other, batch)

    for update, both in enumerate(Recorder.seen):
        values = [entries for entries, _ in both]
        for own, (_, gradient) in enumerate(both):
            assert gradient[[0, -1]].tolist() == [0, 0] and gradient.any()
            for entry in range(1, 7):
                losses = []
                for change in (-1e-5, 1e-5):
                    changed = [one.clone() for one in values]
                    changed[own][entry] += change
                    losses.append(found(changed, batches[update % 2]))
                expected = (losses[1] - losses[0]) / 2e-5
                assert gradient[entry].item() == pytest.approx(expected, rel=1e-2, abs=1e-4)


def test_training_lowers_the_divergence_on_other_batches():
    """Equal calls give equal entries; nothing of the model or of random numbers changes."""
    torch.manual_seed(6)
    model = Layers()
    with torch.no_grad():
        model.table.weight.div_(4)  # else its words predict themselves
    chance = torch.Generator().manual_seed(7)
    words = torch.randint(11, (16, 2, 8, 9), generator=chance)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = {
        form: train_codebooks(
            model, loss, words[:8], {"*": f"{form}/group12"}, bits=2, updates=updates
        )
        for form, updates in (("begun", 0), ("trained", 48), ("again", 48))
    }
    values = NUMBER_FORMATS["trained"]().values
    assert values == NUMBER_FORMATS["again"]().values and (values[0], values[-1]) == (-1, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(one.requires_grad and one.grad is None for one in model.parameters())
    assert model.attention.training and torch.equal(torch.get_rng_state(), random)
    model.eval()
    held = {}
    for form, rounded in found.items():
        other = copy.deepcopy(model)
        other.load_state_dict(rounded, strict=False)
        held[form] = sum(divergence(model, other, batch) for batch in words[8:])
    assert held["trained"] == held["again"] < 0.8 * held["begun"]


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_weights_keep_their_values(rest, dtype):
    model = Layers().to(dtype)
    rounded = train_codebooks(model, loss, word_batches(), {"*": f"mine/{rest}"}, updates=2)
    assert len(rounded) == 5
    form = scaled_format(f"mine/{rest}")
    for name, weight in rounded.items():
        again = form.decode(form.encode(turned(name, weight))).to(dtype)
        assert weight.dtype == dtype and torch.equal(again, turned(name, weight)), name


def test_an_exception_leaves_the_model_as_it_was():
    model, calls = Layers(), []
    state = copy.deepcopy(model.state_dict())

    def stopping(model, batch):
        calls.append(not torch.equal(model.back.weight, state["back.weight"]))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        train_codebooks(model, stopping, word_batches(), {"back.*": "stopped/row"})
    assert calls == [False, False, True, True] and "stopped" not in NUMBER_FORMATS
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_names_are_formats_and_are_saved_with_a_model():
    """A converted model multiplies the rounded weights; where the number is unknown, its state
    loads."""
    torch.manual_seed(4)
    made = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))  # noqa: E731
    model, x = made(), torch.randn(5, 64)
    of_words = lambda model, x: (model(x).sum(), float(len(x)), model(x))  # noqa: E731
    rounded = train_codebooks(model, of_words, [x], {"2.*": "saved/group32"}, updates=2)
    model.load_state_dict(rounded, strict=False)
    quant = lsq.QuantConfig(
        weight_format="float32,2.weight=saved/group32",
        activation_format="float32",
        clip_init="absmax",
    )
    expected = model(x)
    lsq.convert(model, quant)
    model(x)
    y, state = model.eval()(x), model.state_dict()
    torch.testing.assert_close(y, expected)
    number = NUMBER_FORMATS["saved"]()
    forgotten("saved")
    declare_formats(state)
    assert NUMBER_FORMATS["saved"]() == number
    other = made()
    lsq.convert(other, quant)
    other.load_state_dict(state)
    assert torch.equal(other.eval()(x), y)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("mine", {}, "'mine' does not say which values share a scale; give mine/row"),
        ("mine/line", {}, "no grain is called 'line'"),
        ("mine/group16/e8m0", {}, "'mine/group16/e8m0': scales of a codebook that trains are fl"),
        ("nf4/row", {}, "nf4 is a name of lsq's own"),
        ("seven/row", {}, "seven is declared already; choose another name"),
        ("mine/row", {"bits": 7}, "bits is 7; a codebook that trains has 2 to 6"),
        ("mine/row", {"loss": word_loss}, "the loss returns no logits"),
        ("mine/row", {"batches": []}, "the batches have no losses"),
        ("mine/row", {"pattern": "other"}, "no tensor is called 'other'"),
    ],
)
def test_what_is_refused(form, changes, said):
    declare("seven", range(7))
    given = {"loss": loss, "batches": word_batches(), "pattern": "*", "bits": 4, **changes}
    with refused(said):
        train_codebooks(
            Layers(), given["loss"], given["batches"], {given["pattern"]: form}, bits=given["bits"]
        )


def test_no_formats_are_refused():
    with refused("formats are none; give one, such as"):
        train_codebooks(Layers(), loss, word_batches(), {})
