"""What all modules share: calibration, clips in step with training, state dicts, randomness."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lsq.config import QuantConfig
from lsq.layers import FeedForward, QuantizedLinear, TransformerEncoderLayer
from lsq.ops.calibration import Calibration
from tests.layers.oracle import recorded
from tests.layers.shapes import HEADS, HIDDEN, config_of
from tests.ops.test_calibration import measured


def clips_of(module, kind="activation"):
    """Clips of activations or of weights, copied, by name."""
    return {
        name: clip.detach().clone()
        for name, clip in module.named_parameters()
        if name.endswith("_clip") and ("weight" in name) == (kind == "weight")
    }


def linear(**options):
    return QuantizedLinear(16, 16, quant=QuantConfig(**options))


# Calibration


@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_first_batch_is_measured(method, training, grad):
    layer = linear(clip_init=method, percentile=90.0).train(training)
    x = torch.randn(41, 16)
    assert not layer.schedule.calibrated
    with torch.set_grad_enabled(grad):
        layer(x)
    assert layer.schedule.calibrated
    assert torch.equal(layer.input_clip, measured(x, method, percentile=90.0))


def test_every_activation_of_a_layer_is_measured_on_what_is_rounded():
    layer = TransformerEncoderLayer(config_of(clip_init="absmax"))
    assert all(clip == 16.0 for clip in clips_of(layer).values())
    with recorded(layer) as outcome:
        layer(torch.randn(7, 3, HIDDEN))
    assert all(clip != 16.0 for clip in clips_of(layer).values())
    for name in clips_of(layer):
        assert outcome.codes[name].abs().max() == 127, name  # the largest value is the clip
    assert layer.schedule.calibrated


@pytest.mark.parametrize("method", ["mse", "absmax"])
@pytest.mark.parametrize("order", ["aAaA", "Aa Aa", "aaA aaA", "a A", "aaaaaaaaaaaA"])
def test_clips_follow_every_use(method, order):
    """Uses of a layer in one step, steps apart by spaces: a is of inputs ten times as small as
    A."""
    layer = linear(clip_init=method)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    steps = order.split()
    largest = torch.zeros(())
    for number in range(70):
        for size in steps[number % len(steps)]:
            x = torch.randn(29, 16) * (10 if size == "A" else 1)
            largest = torch.maximum(largest, x.abs().max())
            found, expected = layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)
            if number > 1 or size == "A":
                error = (found - expected).norm() / expected.norm()
                assert error < (0.1 if size == "A" else 0.3), (
                    f"{size} of step {number} is {error:.2f} off"
                )
            found.sum().backward()
        optimizer.step()
    assert layer.input_clip <= largest


@pytest.mark.parametrize("method", ["mse", "absmax"])
@pytest.mark.parametrize("form, poisoned", [("int8", 29), ("int8/row", 3)])
def test_nan_in_eval_mode_stays_in_its_row_where_each_row_has_a_scale(method, form, poisoned):
    layer = linear(clip_init=method, activation_format=form).eval()
    x = torch.randn(29, 16)
    layer(x)
    x[4:7, 2:] = float("nan")
    found = layer(x).isnan().any(1)
    assert found.sum() == poisoned and found[4:7].all() and layer.input_clip.isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_clips_follow_every_use_under_checkpointing(reentrant):
    layer = linear(clip_init="absmax", calibration_passes=2)
    for _ in range(3):
        small, large = (
            torch.randn(5, 16, requires_grad=True),
            10 * torch.randn(5, 16).requires_grad_(),
        )
        sum(checkpoint(layer, x, use_reentrant=reentrant).sum() for x in (small, large)).backward()
        assert layer.input_clip >= large.abs().max()


def test_only_the_first_pass_measures_where_no_other_shall():
    layer = linear(calibration_passes=0)
    layer(torch.randn(41, 16))
    before = clips_of(layer)
    layer(9 * torch.randn(41, 16))
    layer.eval()(9 * torch.randn(41, 16))
    assert clips_of(layer) == before


def test_a_fixed_clip_is_never_measured():
    layer = linear(clip_init="fixed", activation_clip=3.0, weight_clip=0.5)
    assert layer.schedule.calibrated
    for _ in range(20):
        layer(torch.randn(41, 16))
    assert layer.input_clip == 3.0 and (layer.weight_clip == 0.5).all()


def test_clips_are_measured_again_while_tensors_grow():
    layer = linear(clip_init="absmax", calibration_passes=16)
    with torch.no_grad():
        layer.weight_clip.fill_(7.0)
    expected, optimizer = 0.0, torch.optim.SGD(layer.parameters(), lr=0.0)
    for number in range(40):
        optimizer.step()
        x = torch.randn(5, 16)
        with torch.no_grad():
            layer.weight.mul_(1.01)
        layer(x)
        if number in (0, 2, 4, 8, 16):
            expected = x.abs().max()
        elif number < 24:
            expected = max(expected, x.abs().max())
        assert layer.input_clip == expected
        assert (layer.weight_clip == 7.0).all() == (number < 2)


def test_clips_of_weights_are_measured_more_often():
    layer = linear(clip_init="absmax", calibration_passes=23)
    measured = []
    for number in range(40):
        with torch.no_grad():
            layer.weight.mul_(1.01)
        before = layer.weight_clip.clone()
        layer(torch.randn(5, 16))
        measured += [number] if not torch.equal(layer.weight_clip, before) else []
    assert measured == [*range(2, 17), 18, 20, 21, 23]
    with torch.no_grad():
        layer.weight.mul_(3)
    assert not layer.schedule.weights_due(training=True)


def test_clips_of_weights_follow_them_from_the_clip_of_before(monkeypatch):
    searches, measure = [], Calibration.measure
    monkeypatch.setattr(
        Calibration,
        "measure",
        lambda self, name, *rest, again=False, **options: (
            searches.append(again) if name == "weight" else None,
            measure(self, name, *rest, again=again, **options),
        ),
    )
    layer = linear(clips="learned")
    assert searches == [False]
    for _ in range(4):
        layer(torch.randn(5, 16))
    assert searches == [False]  # the weight is the same
    for _ in range(3):
        layer.weight.data.mul_(1.05)  # which no version counts
        layer(torch.randn(5, 16))
    assert searches == [False, True, True, True]
    layer.weight.data = layer.weight.data.flip(0)  # the same values for other clips
    layer(torch.randn(5, 16))
    assert searches == [False, True, True, True, True]
    torch.testing.assert_close(
        layer.weight_clip.data, measured(layer.weight.data, per_channel=True), rtol=0.5, atol=0
    )


def test_what_a_pass_without_gradients_measures_stays():
    layer = linear(clip_init="absmax")
    for _ in range(2):
        layer(torch.randn(5, 16))
    x = 10 * torch.randn(5, 16)
    with torch.no_grad():
        layer(x)
    layer(x)
    assert layer.input_clip == x.abs().max()


def test_non_finite_values_are_not_measured():
    layer = linear()
    x = torch.randn(2, 16)
    x[1, 3] = float("inf")
    with pytest.raises(ValueError, match="1 of 32 values are NaN or infinite"):
        layer(x)
    assert not layer.schedule.calibrated


def test_what_cannot_be_measured_is_named():
    layer = linear()
    with pytest.raises(
        ValueError, match="^input: cannot calibrate on a tensor in which 80 of 80 values are NaN"
    ):
        layer(torch.full((5, 16), float("nan")))
    with torch.no_grad():
        layer.weight[3, 4] = float("inf")
    with pytest.raises(
        ValueError, match="^weight: cannot calibrate on a tensor in which 1 of 256 values"
    ):
        layer.calibrate_weights()


@pytest.mark.parametrize("granularity, clips", [("channel", 16), ("tensor", 1)])
def test_weights_are_measured_when_made_and_on_demand(granularity, clips):
    layer = linear(weight_granularity=granularity, clips="learned")
    per_channel = granularity == "channel"
    assert layer.weight_clip.shape == (clips,)
    assert torch.equal(layer.weight_clip, measured(layer.weight, per_channel=per_channel))
    with torch.no_grad():
        layer.weight.mul_(3)
    layer.calibrate_weights()
    assert torch.equal(layer.weight_clip, measured(layer.weight, per_channel=per_channel))


# Clips and optimizers


@pytest.mark.parametrize("leave", ["forward", "eval", "state_dict"])
def test_no_step_takes_a_clip_far_or_below_zero(leave):
    layer = TransformerEncoderLayer(config_of(clip_step=0.01, calibration_passes=0))
    optimizer = torch.optim.SGD(
        [clip for name, clip in layer.named_parameters() if name.endswith("_clip")], lr=1e3
    )
    x = torch.randn(7, 3, HIDDEN)
    layer(x).square().sum().backward()
    before = {**clips_of(layer), **clips_of(layer, "weight")}
    optimizer.step()
    assert any((clip <= 0).any() for clip in layer.parameters())
    if leave == "forward":
        layer(x)
    elif leave == "eval":
        layer.eval()
    state = layer.state_dict()
    for name, clip in before.items():
        assert (state[name] >= 0.9899 * clip).all() and (state[name] <= 1.0101 * clip).all(), name


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_clips_that_cannot_work_are_named(value):
    layer = TransformerEncoderLayer(config_of())
    state = copy.deepcopy(layer.state_dict())
    state["feed_forward.activation_clip"].fill_(value)
    with pytest.raises(ValueError, match=f"0.feed_forward.activation_clip is {value}"):
        torch.nn.Sequential(layer).load_state_dict(
            {f"0.{name}": tensor for name, tensor in state.items()}
        )
    assert layer.feed_forward.activation_clip == 16.0


@pytest.mark.parametrize("passes", [2, 5])
def test_several_passes_before_one_backward(passes):
    """The third and the fifth pass measure clips that earlier passes have saved."""
    layer = linear()
    xs = [torch.randn(3, 16, requires_grad=True) for _ in range(passes)]
    sum(layer(x).square().sum() for x in xs).backward()
    assert all(x.grad is not None for x in xs)


# State


def test_a_state_dict_brings_everything(tmp_path):
    first = TransformerEncoderLayer(config_of(dropout=0.1))
    x = torch.randn(7, 3, HIDDEN)
    for _ in range(3):
        first(x)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second = TransformerEncoderLayer(config_of(dropout=0.1))
    second.load_state_dict(state)
    assert second.schedule.calibrated and second.schedule.passes == 3
    for _ in range(3):  # through the pass that measures again
        outputs = []
        for layer in (first, second):
            with torch.no_grad():
                torch._foreach_mul_([one for one in layer.parameters() if one.dim() == 2], 1.01)
            torch.manual_seed(5)
            outputs.append(layer(x))
        assert torch.equal(*outputs)
    assert all(
        torch.equal(first.state_dict()[name], tensor)
        for name, tensor in second.state_dict().items()
    )


def test_float_mode_has_no_trace_of_quantisation():
    layer = TransformerEncoderLayer(config_of(mode="float"))
    assert not any(
        "clip" in name or "calibrated" in name or "passes" in name for name in layer.state_dict()
    )


def test_copies_are_independent():
    layer = linear()
    x = torch.randn(3, 16)
    layer(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.neg_()
        assert not torch.equal(layer.eval()(x), twin.eval()(x))


# Randomness


def test_seeds_repeat_dropout_and_nothing_else_does():
    layer = FeedForward(config_of(dropout=0.3, calibration_passes=0))
    x = torch.randn(7, HIDDEN)
    layer(x)
    torch.manual_seed(3)
    first = layer(x)
    assert not torch.equal(layer(x), first)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_a_restored_generator_repeats_a_run():
    layer = TransformerEncoderLayer(config_of(dropout=0.3, backward="int8", calibration_passes=0))
    x = torch.randn(5, 3, HIDDEN)
    layer(x)
    generator = torch.get_rng_state()
    runs = []
    for _ in range(2):
        torch.set_rng_state(generator)
        layer.zero_grad()
        layer(x).square().sum().backward()
        runs.append([parameter.grad for parameter in layer.parameters()])
    assert all(map(torch.equal, *runs))


# Memory


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_what_autograd_saves_is_int8(backward):
    """Beside parameters and numbers for each row, nothing is float [M, N]."""
    layer = TransformerEncoderLayer(config_of(backward=backward, dropout=0.1))
    x = torch.randn(41, 3, HIDDEN)
    parameters = {tensor.data_ptr() for tensor in layer.parameters()}
    saved = []

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    rows = [tensor for tensor in saved if tensor.dim() == 2 and tensor.is_floating_point()]
    assert [tuple(tensor.shape) for tensor in rows] == [(123, HEADS)]
    assert sum(tensor.dtype == torch.int8 for tensor in saved) >= 10
    assert {tensor.dtype for tensor in saved} <= {
        torch.int8,
        torch.uint8,
        torch.float32,
        torch.int32,
        torch.int64,
    }


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_evaluation_draws_no_random_numbers(backward):
    """Gradients are rounded under a key made of the input and a weight: another after each
    update."""
    layer = TransformerEncoderLayer(config_of(backward=backward))
    x, wanted = torch.randn(2, 7, 3, HIDDEN)
    layer(x)
    layer.eval()
    state, found = torch.get_rng_state(), []
    for _ in range(3):
        layer.zero_grad()
        (layer(x) * wanted).sum().backward()
        found.append(
            torch.cat([one.grad.flatten() for one in layer.parameters() if one.grad is not None])
        )
        if len(found) == 2:
            with torch.no_grad():
                torch._foreach_mul_(list(layer.parameters()), 1 + 1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).norm() > 1e-3 * found[0].norm() or backward == "float"
