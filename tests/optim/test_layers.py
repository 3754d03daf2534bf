"""What lsq's layers leave to lsq.optim.Adam: limits of clips, and codes, not used after any
change."""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.layers.schedule import Schedule
from lsq.ops.rounding import RoundWeight
from lsq.optim import Adam
from lsq.run import parameter_state
from lsq.run.parameter_state import state_of
from tests.constants import quant_with
from tests.layers.shapes import HIDDEN, config_of
from tests.optim.test_adam import OPTIONS


def layer_of(**options):
    return TransformerEncoderLayer(config_of(calibration_passes=3, **options))


def update(layer, optimizer, seed, passes=1):
    for number in range(passes):
        torch.manual_seed(10 * seed + number)
        layer(torch.randn(7, 3, HIDDEN)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def rounded(monkeypatch):
    """How often weights are rounded, in a list of one number."""
    count, original = [0], RoundWeight.cpu

    def cpu(operation):
        count[0] += 1
        original(operation)

    monkeypatch.setattr(RoundWeight, "cpu", cpu)
    return count


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_layer_trains_as_with_another_optimizer(granularity, passes, rounded):
    """But that codes come from the optimizer, not from the pass, once clips of weights are not
    measured any more."""
    torch.manual_seed(1)
    ours = layer_of(backward="int8", clip_step=0.001, weight_granularity=granularity)
    theirs = copy.deepcopy(ours)
    optimizers = (
        Adam(ours.parameters(), **OPTIONS, torch_epsilon=False),
        FairseqAdam(theirs.parameters(), **OPTIONS),
    )
    for number in range(5):
        update(theirs, optimizers[1], number, passes)
        theirs.limit_clip_steps()
        before = rounded[0]
        update(ours, optimizers[0], number, passes)
        if number == 4:
            assert rounded[0] == before
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        theirs.load_state_dict(ours.state_dict())


def test_clips_stay_near_and_no_copy_is_kept(monkeypatch):
    layer = layer_of(clip_step=0.01)
    optimizer = Adam(layer.parameters(), lr=5.0)
    update(layer, optimizer, 0)
    layer.load_state_dict(layer.state_dict())
    for number in range(1, 4):
        before = {name: clip.detach().clone() for name, clip in layer.clips().items()}
        layer.schedule.calibrated = True
        monkeypatch.setattr(Schedule, "activations_due", lambda *_, **__: False)
        monkeypatch.setattr(Schedule, "weights_due", lambda *_, **__: False)
        update(layer, optimizer, number)
        for name, clip in layer.clips().items():
            assert ((clip / before[name] - 1).abs() <= 0.0101).all() and not torch.equal(
                clip, before[name]
            ), name
            assert state_of(clip).before is None


def step_of_another(layer, gradient) -> None:
    """It steps through .data."""
    layer.weight.grad = gradient
    FairseqAdam([layer.weight], lr=0.1).step()


def one_value(like: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(like)
    found[1, 3] = 1.0
    return found


def measure(layer) -> None:
    layer.weight_clip.data.fill_(3.0)
    layer.calibrate_weights()


def leave_and_return(layer) -> None:
    layer.eval()
    layer.weight.data[1, 3] += 1.0
    layer.train()


CHANGES = {
    "in place": torch.no_grad()(lambda layer: layer.weight.mul_(0.5)),
    "load": lambda layer: layer.load_state_dict(
        {**layer.state_dict(), "weight": -layer.weight.detach()}
    ),
    "new memory": lambda layer: setattr(layer.weight, "data", layer.weight.data * 3),
    "through data": lambda layer: layer.weight.data.mul_(-1),
    "a wider clip": torch.no_grad()(lambda layer: layer.weight_clip.mul_(4)),
    "another optimizer": lambda layer: step_of_another(layer, torch.ones_like(layer.weight)),
    "few values by it": lambda layer: step_of_another(layer, one_value(layer.weight)),
    "another parameter": lambda layer: setattr(
        layer, "weight", torch.nn.Parameter(-layer.weight.detach())
    ),
    "measure": measure,
    "leave and return": leave_and_return,
}


def fixed() -> QuantizedLinear:
    return QuantizedLinear(16, 16, quant=quant_with(calibration_passes=0, clip_init="fixed"))


def trained() -> tuple[QuantizedLinear, torch.Tensor, Adam]:
    """A layer whose optimizer has made the codes of its weight, an input, and the optimizer."""
    layer = fixed()
    optimizer, x = Adam(layer.parameters(), lr=0.01), torch.randn(5, 16)
    for _ in range(3):
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, x, optimizer


@pytest.mark.parametrize("change", CHANGES)
def test_codes_of_other_weights_are_not_used(change, rounded):
    """After any change of a weight a pass computes what a copy computes, which has no codes."""
    layer, x, _optimizer = trained()
    before = rounded[0]
    layer(x)
    assert rounded[0] == before, "the codes of the optimizer were not used"
    CHANGES[change](layer)
    assert torch.equal(layer(x), copy.deepcopy(layer)(x))
    assert rounded[0] == before + 2


def negated(layer, x) -> None:
    values = {name: -one.detach() for name, one in layer.named_parameters()}
    torch.func.functional_call(layer, values, (x,))


def for_a_while(layer, x, owner, name: str, value) -> None:
    """Run a pass with another value of an attribute of the layer or of one of its parameters."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    layer(x)
    setattr(owner, name, before)


@pytest.mark.parametrize(
    "call",
    [
        negated,
        lambda layer, x: for_a_while(layer, x, layer.weight, "data", -layer.weight.data),
        lambda layer, x: for_a_while(
            layer, x, layer.weight_clip, "data", 3 * layer.weight_clip.data
        ),
        lambda layer, x: for_a_while(
            layer, x, layer, "weight", torch.nn.Parameter(-layer.weight.detach())
        ),
    ],
    ids=["as a function", "values", "clips", "parameter"],
)
def test_codes_that_a_pass_wrote_over_are_not_used(call):
    """The weights are again those of which the optimizer made codes, but a pass with others came
    between."""
    layer, x, _optimizer = trained()
    expected = copy.deepcopy(layer)(x)
    call(layer, x)
    assert torch.equal(layer(x), expected)


def test_codes_under_a_clip_that_another_optimizer_moved_too_far_are_not_used(monkeypatch):
    """Nor where values are not compared, as on a GPU."""
    monkeypatch.setattr(parameter_state, "_sample", lambda tensor: tensor.detach()[:0])
    layer = fixed()
    others = [one for one in layer.parameters() if one is not layer.weight_clip]
    mine, other, x = (
        Adam(others, lr=0.01),
        torch.optim.SGD([layer.weight_clip], lr=10.0),
        torch.randn(5, 16),
    )
    for _ in range(6):
        layer(x).square().sum().backward()
        other.step()
        mine.step()
        assert torch.equal(layer(x), copy.deepcopy(layer)(x))


def test_codes_under_frozen_clips_come_from_the_optimizer(rounded):
    layer = fixed()
    layer.weight_clip.requires_grad_(False)
    optimizer, x, counts = Adam(layer.parameters(), lr=0.01), torch.randn(5, 16), []
    for _ in range(4):
        layer(x).square().sum().backward()
        optimizer.step()
        counts.append(rounded[0])
    assert counts[1:] == counts[:-1]


def test_a_copy_of_a_layer_is_independent():
    layer = fixed()
    optimizer, x = Adam(layer.parameters(), lr=0.01), torch.randn(5, 16)
    for _ in range(2):
        layer(x).square().sum().backward()
        optimizer.step()
    twin = copy.deepcopy(layer)
    expected = twin(x)
    layer(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(twin(x), expected) and not torch.equal(layer(x), expected)


def test_another_optimizer_that_takes_over_is_limited():
    layer = layer_of(clip_step=0.01)
    mine, other = Adam(layer.parameters(), lr=1e-3), torch.optim.SGD(layer.parameters(), lr=1e3)
    for number in range(4):
        update(layer, mine, number)
    torch.manual_seed(0)
    layer(torch.randn(7, 3, HIDDEN)).square().sum().backward()
    before = {name: clip.detach().clone() for name, clip in layer.clips().items()}
    other.step()
    state = layer.state_dict()
    assert all(((state[name] / clip - 1).abs() <= 0.0101).all() for name, clip in before.items())


def test_packed_weights_are_rounded_by_the_pass(rounded):
    layer = QuantizedLinear(32, 16, quant=quant_with(weight_format="int4", calibration_passes=0))
    optimizer, x = Adam(layer.parameters(), lr=0.01), torch.randn(5, 32)
    for number in range(3):
        layer(x).square().sum().backward()
        optimizer.step()
        assert rounded[0] == number + 1
