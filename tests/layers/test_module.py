"""What all modules share: calibration, clips, state dicts, randomness, the float fallback."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lsq.layers import (
    FeedForward,
    QuantizedLinear,
    TransformerEncoderLayer,
    VocabularyProjection,
    programs,
)
from lsq.layers.builder import in_floats
from lsq.layers.linear import linear as linear_program
from lsq.layers.module import held
from lsq.ops.calibration import Calibration
from tests.constants import quant_with
from tests.layers.examples import SENTENCES, mode_on
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
    return QuantizedLinear(16, 16, quant=quant_with(**options))


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
    for name, clip in clips_of(layer).items():
        assert clip != 16.0
        assert outcome.codes[name].abs().max() == 127, name  # the largest value is the clip
    assert layer.schedule.calibrated


@pytest.mark.parametrize("method", ["mse", "absmax"])
@pytest.mark.parametrize("order", ["aAaA", "Aa Aa", "aaA aaA", "a A", "aaaaaaaaaaaA"])
def test_clips_follow_every_use(method, order):
    """Steps of uses, apart by spaces: a is of inputs ten times as small as A."""
    layer = linear(clip_init=method)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    steps, largest = order.split(), torch.zeros(())
    for number in range(70):
        for size in steps[number % len(steps)]:
            x = torch.randn(29, 16) * (10 if size == "A" else 1)
            largest = torch.maximum(largest, x.abs().max())
            found, expected = layer(x), functional.linear(x, layer.weight, layer.bias)
            if number > 1 or size == "A":
                error = (found - expected).norm() / expected.norm()
                assert error < (0.1 if size == "A" else 0.3), (size, number)
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
        small = torch.randn(5, 16, requires_grad=True)
        large = 10 * torch.randn(5, 16).requires_grad_()
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
    """Clips of weights more often."""
    layer = linear(clip_init="absmax", calibration_passes=16)
    with torch.no_grad():
        layer.weight_clip.fill_(7.0)
    expected, optimizer = 0.0, torch.optim.SGD(layer.parameters(), lr=0.0)
    weights = []
    for number in range(40):
        optimizer.step()
        x, before = torch.randn(5, 16), layer.weight_clip.clone()
        with torch.no_grad():
            layer.weight.mul_(1.01)
        layer(x)
        if number in (0, 2, 4, 8, 16):
            expected = x.abs().max()
        elif number < 24:
            expected = max(expected, x.abs().max())
        assert layer.input_clip == expected
        weights += [] if torch.equal(layer.weight_clip, before) else [number]
    assert weights == [*range(2, 17)]
    layer = linear(calibration_passes=23)
    layer.schedule.passes = 16
    due = []
    for _ in range(16, 40):
        due += [layer.schedule.passes] if layer.schedule.weights_due(training=True) else []
        layer.schedule.passes += 1
    assert due == [16, 18, 20, 21, 23]


def test_clips_of_weights_follow_them_from_the_clip_of_before(monkeypatch):
    searches, measure = [], Calibration.measure

    def noted(self, name, *rest, again=False, **options):
        searches.extend([again] * (name == "weight"))
        measure(self, name, *rest, again=again, **options)

    monkeypatch.setattr(Calibration, "measure", noted)
    layer = linear(clips="learned")
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
    expected = measured(layer.weight.data, per_channel=True)
    torch.testing.assert_close(layer.weight_clip.data, expected, rtol=0.5, atol=0)


def test_what_a_pass_without_gradients_measures_stays():
    layer = linear(clip_init="absmax")
    for _ in range(2):
        layer(torch.randn(5, 16))
    x = 10 * torch.randn(5, 16)
    with torch.no_grad():
        layer(x)
    layer(x)
    assert layer.input_clip == x.abs().max()


def test_what_cannot_be_measured_is_named():
    layer, x = linear(), torch.randn(2, 16)
    x[1, 3] = float("inf")
    for given, said in ((x, "1 of 32"), (torch.full((5, 16), float("nan")), "80 of 80")):
        with pytest.raises(ValueError, match=f"^input: .* {said} values are NaN or infinite"):
            layer(given)
    assert not layer.schedule.calibrated
    with torch.no_grad():
        layer.weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="^weight: cannot calibrate on .* 1 of 256 values"):
        layer.calibrate_weights()


@pytest.mark.parametrize("granularity, clips", [("channel", 16), ("tensor", 1)])
def test_weights_are_measured_when_made_and_on_demand(granularity, clips):
    layer = linear(weight_granularity=granularity, clips="learned")
    assert layer.weight_clip.shape == (clips,)
    for _ in range(2):
        expected = measured(layer.weight, per_channel=granularity == "channel")
        assert torch.equal(layer.weight_clip, expected)
        with torch.no_grad():
            layer.weight.mul_(3)
        layer.calibrate_weights()


# Clips and optimizers


@pytest.mark.parametrize("leave", ["forward", "eval", "state_dict"])
def test_no_step_takes_a_clip_far_or_below_zero(leave):
    layer = TransformerEncoderLayer(config_of(clip_step=0.01))
    clips = [clip for name, clip in layer.named_parameters() if name.endswith("_clip")]
    optimizer, x = torch.optim.SGD(clips, lr=1e3), torch.randn(7, 3, HIDDEN)
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
    model = torch.nn.Sequential(layer)
    with pytest.raises(ValueError, match=f"0.feed_forward.activation_clip is {value}"):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()})
    assert layer.feed_forward.activation_clip == 16.0


@pytest.mark.parametrize("passes", [2, 5])
def test_several_passes_before_one_backward(passes):
    """The third and the fifth pass measure clips that earlier passes have saved."""
    layer, xs = linear(), [torch.randn(3, 16, requires_grad=True) for _ in range(passes)]
    sum(layer(x).square().sum() for x in xs).backward()
    assert all(x.grad is not None for x in xs)


# State


def test_a_state_dict_brings_everything(tmp_path):
    first, second = (TransformerEncoderLayer(config_of(dropout=0.1)) for _ in range(2))
    x = torch.randn(7, 3, HIDDEN)
    for _ in range(3):
        first(x)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.schedule.calibrated and second.schedule.passes == 3
    for _ in range(3):  # through the pass that measures again
        outputs = []
        for layer in (first, second):
            with torch.no_grad():
                torch._foreach_mul_([one for one in layer.parameters() if one.dim() == 2], 1.01)
            torch.manual_seed(5)
            outputs.append(layer(x))
        assert torch.equal(*outputs)
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_float_mode_has_no_trace_of_quantisation():
    names = TransformerEncoderLayer(config_of(mode="float")).state_dict()
    traces = ("clip", "calibrated", "passes")
    assert not any(trace in name for name in names for trace in traces)


# Devices


@pytest.mark.parametrize("training", [False, True])
def test_inputs_elsewhere_are_refused(training):
    layer = linear().train(training)
    before = layer.state_dict()
    expected = (
        "x is on meta, but the parameters of this QuantizedLinear are on cpu; move one of"
        " the two with .to()"
    )
    with pytest.raises(ValueError, match=expected):
        layer(torch.empty(3, 16, device="meta"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("rows", [3, 401])
def test_another_default_device_changes_nothing(rows):
    def trained(default: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = QuantizedLinear(48, 208)
        x = torch.randn(rows, 48, requires_grad=True)
        with torch.device(default):
            for _ in range(3):
                layer(x).square().sum().backward()
            return [x.grad, *layer.state_dict().values()]

    assert all(map(torch.equal, trained("meta"), trained("cpu")))


# Randomness


def test_seeds_repeat_dropout_and_nothing_else_does():
    layer = FeedForward(config_of(dropout=0.3))
    x = torch.randn(7, HIDDEN)
    layer(x)
    torch.manual_seed(3)
    first = layer(x)
    assert not torch.equal(layer(x), first)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_evaluation_draws_no_random_numbers(backward):
    """Gradients are rounded under a key of the input and a weight: another after each update."""
    layer = TransformerEncoderLayer(config_of(backward=backward))
    x, wanted = torch.randn(2, 7, 3, HIDDEN)
    layer(x)
    layer.eval()
    state, found = torch.get_rng_state(), []
    for _ in range(3):
        layer.zero_grad()
        (layer(x) * wanted).sum().backward()
        gradients = [one.grad.flatten() for one in layer.parameters() if one.grad is not None]
        found.append(torch.cat(gradients))
        if len(found) == 2:
            with torch.no_grad():
                torch._foreach_mul_(list(layer.parameters()), 1 + 1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).norm() > 1e-3 * found[0].norm() or backward == "float"


# Memory


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_what_autograd_saves_is_int8(backward):
    """Beside parameters and numbers for each row, nothing is float [M, N]."""
    layer = TransformerEncoderLayer(config_of(backward=backward, dropout=0.1))
    parameters, saved = {tensor.data_ptr() for tensor in layer.parameters()}, []

    def pack(tensor):
        saved.extend([tensor] * (tensor.data_ptr() not in parameters))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(41, 3, HIDDEN))
    rows = [tensor for tensor in saved if tensor.dim() == 2 and tensor.is_floating_point()]
    assert [tuple(tensor.shape) for tensor in rows] == [(123, HEADS)]
    dtypes = [tensor.dtype for tensor in saved]
    assert dtypes.count(torch.int8) >= 10
    assert set(dtypes) <= {torch.int8, torch.uint8, torch.float32, torch.int32, torch.int64}


# The float fallback


def test_a_program_in_floats_is_that_of_float_mode():
    config, mode = config_of(), mode_on()
    plain = replace(config, quant=replace(config.quant, mode="float"))
    made = in_floats(programs.encoder_layer(config, SENTENCES, mode, causal=True))
    assert str(made) == str(programs.encoder_layer(plain, SENTENCES, mode, causal=True))
    assert in_floats(made) is made
    dtypes = (torch.bfloat16,) * 3
    product = in_floats(linear_program(config.quant, 5, 16, 32, mode, bias=True, dtypes=dtypes))
    assert {one.dtype for one in (*product.inputs[1:], *product.outputs)} == {torch.float32}


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_fell_back_is_one_of_float_mode(training):
    torch.manual_seed(1)
    layer = TransformerEncoderLayer(config_of()).train(training)
    plain = TransformerEncoderLayer(config_of(mode="float")).train(training)
    state = layer.state_dict()
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    layer.fall_back()
    x = torch.randn(5, 3, HIDDEN)
    expected = plain(x)
    assert torch.equal(layer(x), expected)
    expected.sum().backward()
    layer(x).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(layer.get_parameter(name).grad, parameter.grad), name
    assert all(clip.grad is None for clip in layer.clips().values())


def test_a_vocabulary_that_fell_back_has_all_words():
    layer, x = VocabularyProjection(37, 32), torch.randn(5, 32)
    layer.fall_back()
    logits = x @ layer.weight.t()
    torch.testing.assert_close(layer(x), logits)
    loss, _ = layer.loss(x, torch.arange(5))
    torch.testing.assert_close(loss, functional.cross_entropy(logits, torch.arange(5)) * 5)


def test_held_parameters_are_reached_without_a_gradient():
    y, parameter = torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    reached = []
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: reached.append(True))
    (held(y * 2, [parameter]) * torch.arange(3.0)).sum().backward()
    assert reached and parameter.grad is None
    assert torch.equal(y.grad, 2 * torch.arange(3.0))
