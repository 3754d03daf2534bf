"""Codes of weights: made again when anything changes, kept while nothing does."""

import copy
import pickle

import numpy
import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.weight_state import encoded
from lsq.ops.rounding import RoundWeight
from lsq.optim import Adam
from lsq.run.backends import backend
from tests.constants import quant_with
from tests.layers.shapes import HIDDEN, config_of


def linear(**options):
    return QuantizedLinear(16, 16, quant=quant_with(**options))


def optimize(layer):
    optimizer = torch.optim.SGD([layer.feed_forward.fc1_weight], lr=10.0)
    layer(torch.randn(5, 3, HIDDEN)).square().sum().backward()
    optimizer.step()


@torch.no_grad()
def load_a_part(layer):
    state = layer.feed_forward.state_dict()
    layer.feed_forward.load_state_dict(state | {"fc1_weight": -state["fc1_weight"]})


@torch.no_grad()
def measure_a_part(layer):
    layer.feed_forward.fc1_weight.data.mul_(3)
    layer.calibrate_weights()


def replace_a_weight(layer):
    layer.feed_forward.fc1_weight = torch.nn.Parameter(-layer.feed_forward.fc1_weight.detach())


def replace_data_at_the_same_place(layer):
    memory = layer.feed_forward.fc1_weight.detach().numpy()
    memory *= -2
    # as an allocator may give freed memory again
    layer.feed_forward.fc1_weight.data = torch.from_numpy(memory)


CHANGES = [
    optimize,
    load_a_part,
    measure_a_part,
    replace_a_weight,
    replace_data_at_the_same_place,
    lambda layer: layer.feed_forward.fc2_weight_clip.detach().mul_(4),
    lambda layer: layer.train().feed_forward.fc1_weight.data.neg_(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_codes_are_made_again_when_weights_change(change):
    layer = TransformerEncoderLayer(config_of())
    x = torch.randn(5, 3, HIDDEN)
    layer(x)
    layer.eval()
    with torch.no_grad():
        before = layer(x)
        assert torch.equal(layer(x), before)
    change(layer)
    with torch.no_grad():
        assert not torch.equal(layer.eval()(x) if layer.training else layer(x), before)


@pytest.fixture
def made(monkeypatch) -> list:
    """The weights that are rounded from now on."""
    made, original = [], RoundWeight.cpu
    monkeypatch.setattr(RoundWeight, "cpu", lambda *given: made.append(1) or original(*given))
    return made


def test_codes_are_kept_while_nothing_changes(made):
    layer, x = linear().eval(), torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    assert made == [1]
    assert layer.weight_state.kept  # but no copy takes them along
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not twin.weight_state.kept


def test_codes_that_another_thread_still_makes_are_not_used(monkeypatch):
    layer, x, original = (linear(clip_init="fixed").eval(), torch.randn(3, 16), RoundWeight.cpu)
    nested = []

    def cpu(operation):
        if not nested:
            nested.append(None)
            nested[0] = layer(x)  # as another thread might in this moment
        return original(operation)

    monkeypatch.setattr(RoundWeight, "cpu", cpu)
    with torch.no_grad():
        assert torch.equal(layer(x), nested[0])
        assert torch.equal(layer(x), nested[0])


@pytest.mark.parametrize("lasting", [False, True])
def test_a_pass_with_other_parameters_leaves_the_codes_of_a_waiting_pass(lasting):
    """As of a teacher, whose weights are a mean of the student's."""
    first, found = linear(calibration_passes=0, clip_init="fixed"), []
    for beside in (False, True):
        torch.manual_seed(1)
        layer, x = copy.deepcopy(first), torch.ones(5, 16, requires_grad=True)
        y = layer(x)
        if beside:
            weight = -layer.weight.detach()
            with torch.no_grad():
                torch.func.functional_call(
                    layer, {"weight": torch.nn.Parameter(weight) if lasting else weight}, x
                )
        y.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_training_follows_a_pass_in_inference_mode():
    layer = linear(calibration_passes=0, clip_init="fixed")
    with torch.inference_mode():
        expected = layer(torch.ones(5, 16))
    y = layer(torch.ones(5, 16))
    y.sum().backward()
    assert torch.equal(y, expected) and layer.weight.grad is not None


def parameter(weight, like):
    return torch.nn.Parameter(weight.clone(), requires_grad=like.requires_grad)


PUT = {
    "copied": lambda layer, new: layer.weight.copy_(new),
    "copied through data": lambda layer, new: layer.weight.data.copy_(new),
    "copied by numpy": lambda layer, new: numpy.copyto(layer.weight.detach().numpy(), new.numpy()),
    "other data": lambda layer, new: setattr(layer.weight, "data", new.clone()),
    "another one": lambda layer, new: setattr(layer, "weight", parameter(new, layer.weight)),
}


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("grain", ["row", "tensor"])
def test_ternary_codes_of_weights_in_either_layout(grain, in_out):
    rows = torch.randn(32, 80) * torch.rand(32, 1)
    mean = rows.abs().mean(1) if grain == "row" else rows.abs().mean().reshape(1)
    codes = encoded(
        rows.t() if in_out else rows,
        torch.ones(len(mean)),
        QuantConfig(weight_format="ternary/" + grain).weight_form("weight"),
        backend("cpu"),
        rows=48,
        in_out=in_out,
        absmax=True,
    )
    torch.testing.assert_close(codes.scale[:32], mean.expand(32), rtol=1e-6, atol=0)
    wanted = torch.where(rows.abs() > mean[:, None] / 2, rows.sign(), 0).to(torch.int8)
    assert torch.equal(codes.stored[:32], wanted) and not codes.stored[32:].any()


def test_state_dicts_hold_mean_magnitudes_of_present_weights():
    layer, x = (
        QuantizedLinear(16, 16, quant=QuantConfig(weight_format="int2/row")),
        torch.ones(3, 16),
    )
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.add_(torch.randn(16, 16))
    mean = layer.weight.detach().abs().mean(1)
    torch.testing.assert_close(layer.state_dict()["weight_clip"], mean)
    trained = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), trained)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("put", PUT)
def test_other_weights_put_into_a_layer_are_used_and_measured(put, frozen):
    """In eval mode, and in training mode where the layer is frozen."""
    torch.manual_seed(0)
    layer, other = QuantizedLinear(64, 48), torch.nn.Linear(64, 48, bias=False)
    x = torch.randn(70, 64)
    other.weight.data.mul_(8)
    with torch.no_grad():
        layer.bias.zero_()
        layer(x)
        layer.requires_grad_(False) if frozen else layer.eval()
        layer(x)
        PUT[put](layer, other.weight.detach())
        wanted = other(x)
        assert (layer(x) - wanted).norm() < 0.02 * wanted.norm()


def test_one_value_written_unseen_is_used():
    layer, x = linear(clip_init="fixed").eval(), torch.ones(3, 16)
    with torch.no_grad():
        before = layer(x)
        layer.weight.data[5, 7] = 0.7
        assert (layer(x) != before).nonzero()[:, 1].tolist() == [5] * 3


@torch.no_grad()
def test_clips_that_come_with_weights_or_are_frozen_stay():
    for frozen in (False, True):
        layer, x = linear(clips="learned"), torch.ones(3, 16)
        layer(x)
        layer.eval()(x)
        layer.weight_clip.requires_grad_(not frozen)
        layer.weight.mul_(2)
        if not frozen:
            layer.weight_clip.mul_(3)
        clip = layer.weight_clip.clone()
        layer(x)
        assert torch.equal(layer.weight_clip, clip)


def test_memory_of_several_processes_is_never_rounded_by_the_optimizer(made):
    layer = linear(calibration_passes=0, clip_init="fixed").share_memory()
    optimizer, x = Adam(layer.parameters()), torch.ones(3, 16)
    for number in range(3):
        layer(x).sum().backward()
        optimizer.step()
        assert made == [1] * (number + 1)
