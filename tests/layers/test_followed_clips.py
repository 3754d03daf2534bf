"""Clips that follow the largest magnitudes: what passes see, in every way in which they run."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.layers.followed_clips import KEPT
from lsq.layers.schedule import WINDOW
from lsq.observe import observe
from lsq.optim import Adam


def layer_of(**options) -> QuantizedLinear:
    """A layer past the passes that measure."""
    torch.manual_seed(0)
    layer = QuantizedLinear(48, 32, quant=QuantConfig(**options))
    for _ in range(WINDOW):
        step(layer, 0.5)
    return layer


def step(layer: QuantizedLinear, *sizes: float) -> None:
    """Passes over inputs of so large values, and a step that changes nothing."""
    for size in sizes:
        layer(torch.full((3, 48), size)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    layer.zero_grad()


def largest(values: list[float], clip: float = 0.5) -> float:
    for value in values:
        clip = max(value, clip * KEPT)
    return clip


def test_weights_have_the_largest_magnitude_of_each_row():
    layer, x = layer_of(), torch.randn(5, 48)
    for change in (1.0, 3.0, 0.1):
        with torch.no_grad():
            layer.weight.mul_(change)
        layer(x).sum().backward()
        assert torch.equal(layer.weight_clip, layer.weight.abs().amax(1))
    assert not layer.weight_clip.requires_grad and layer.weight_clip.grad is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Adam])
def test_weights_after_a_step(optimizer):
    layer, x = layer_of(), torch.randn(5, 48)
    steps = optimizer(layer.parameters(), lr=0.05)
    for _ in range(3):
        layer(x).sum().backward()
        steps.step()
        layer(x)
        assert torch.equal(layer.weight_clip, layer.weight.abs().amax(1))


def test_activations_follow_the_passes_before():
    layer, sizes = layer_of(), [0.7, 0.2, 0.2, 3.0, 1.0]
    for number, size in enumerate(sizes):
        step(layer, size)
        assert layer.input_clip.item() == pytest.approx(largest(sizes[:number]))
    assert layer.state_dict()["input_clip"].item() == pytest.approx(largest(sizes))
    assert layer.input_clip.item() == pytest.approx(largest(sizes))  # and once alone
    layer(torch.full((3, 48), 0.1)).sum().backward()
    assert layer.input_clip.item() == pytest.approx(largest(sizes))


def test_all_passes_of_a_step_count_alike():
    layer = layer_of()
    step(layer, *[0.1] * 20, 4.0)
    step(layer, 4.0, *[0.1] * 20)
    assert layer.eval().input_clip == 4.0
    step(layer.train(), *[0.1] * 20)
    assert layer.eval().input_clip == 4.0 * KEPT


@pytest.mark.parametrize(
    "look",
    [
        QuantizedLinear.state_dict,
        copy.deepcopy,
        lambda layer: layer.eval().train(),
        lambda layer: None,
    ],
)
def test_a_look_before_a_step_changes_nothing(look):
    layer, sizes = layer_of(), [4.0, 0.1, 0.3]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for size in sizes:
        layer(torch.full((3, 48), size)).sum().backward()
        look(layer)
        optimizer.step()
    assert layer.eval().input_clip.item() == pytest.approx(largest(sizes))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_mended_has_a_clip_again(value):
    layer, x = layer_of(), torch.randn(5, 48)
    weight = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight[3] = value
    layer.state_dict()
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.weight[3] = 0.0
    layer(x).sum().backward()
    wanted = layer.weight.abs().amax(1)
    wanted[3] = 1.0
    assert torch.equal(layer.weight_clip, wanted)
    assert layer.state_dict()["weight_clip"].isfinite().all()


def test_passes_that_are_looked_at_record_the_same():
    one, other = layer_of(), layer_of()
    for size in (2.0, 0.1):
        step(one, size)
        with observe(other):
            step(other, size)
    one.eval(), other.eval()
    assert one.input_clip == other.input_clip == 2.0 * KEPT


def test_evaluation_and_passes_without_gradients_record_nothing():
    layer = layer_of()
    layer.eval()
    layer(torch.full((3, 48), 9.0, requires_grad=True)).sum().backward()
    with torch.no_grad():
        layer.train()(torch.full((3, 48), 9.0))
    layer(torch.full((3, 48), 0.5)).sum().backward()
    assert layer.eval().input_clip == 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_is_no_number_or_nothing_at_all_leaves_the_clip(value):
    layer = layer_of()
    for _ in range(3):
        step(layer, value)
    assert layer.eval().input_clip == 0.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_that_runs_again_has_the_clips_of_the_first_time(reentrant):
    found = []
    for checkpointed in (False, True):
        layer, clips = layer_of(), []
        for size in (2.0, 0.1):
            torch.manual_seed(3)
            x = torch.full((3, 48), size, requires_grad=True)
            y = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
            y.square().sum().backward()
            clips.append((layer.input_clip.item(), x.grad.clone()))
        found.append((clips, layer.eval().input_clip.item()))
    (plain, last), (again, last_again) = found
    assert last == last_again
    for (clip, gradient), (other, other_gradient) in zip(plain, again, strict=True):
        assert clip == other and torch.equal(gradient, other_gradient)


def test_copies_and_saved_states_go_on():
    layer = layer_of()
    step(layer, 2.0)
    saved = QuantizedLinear(48, 32)
    saved.load_state_dict(layer.state_dict())
    for one in (copy.deepcopy(layer), saved, layer.double().float()):
        step(one, 0.1)
        assert one.input_clip == 2.0
        assert one.eval().input_clip == 2.0 * KEPT


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, Adam])
def test_a_state_has_the_clips_of_its_weights(optimizer):
    layer = layer_of()
    steps = optimizer(layer.parameters(), lr=0.1)
    layer(torch.randn(5, 48)).sum().backward()
    steps.step()
    state = layer.state_dict()
    assert torch.equal(state["weight_clip"], state["weight"].abs().amax(1))


def test_values_beyond_the_clip_have_a_gradient():
    layer = layer_of(backward="float")
    x = torch.full((3, 48), 0.5)
    x[0, 0] = 0.9
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.abs().min() > 0


def test_what_is_of_learned_clips_alone():
    assert QuantConfig().clips == "auto" and not QuantConfig().learned
    for options in (
        {"bits": 4},
        {"weight_format": "int4"},
        {"clip_gradient": "lsq"},
        {"clip_init": "absmax"},
    ):
        assert QuantConfig(**options).learned
        if "bits" not in options:
            with pytest.raises(
                ValueError, match=f'{next(iter(options))} is .*but clips is "absmax"'
            ):
                QuantConfig(clips="absmax", **options)
    with pytest.raises(ValueError, match="clips is 'largest'; allowed"):
        QuantConfig(clips="largest")
