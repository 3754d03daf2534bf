"""Signal-to-noise of tensors, and bounds."""

import copy
import math

import pytest
import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig, Rotary
from lsq.layers import (
    FeedForward,
    MultiheadAttention,
    QuantizedLinear,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
)
from lsq.observe.noise import LEAST, MOST, QUANTITIES, Bounds, Reading, Sample, decibels


def test_neither_large_rows_nor_many_small_ones_hide_noise():
    noise = [torch.randn(40, 300, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    for dim in (0, 1):
        even = decibels((noise[0], noise[0] + 0.01 * noise[1], dim))
        assert even == pytest.approx(40, abs=0.6)
    for rows, wrong, answer in ((10, slice(1, None), -10 * math.log10(0.9)), (1000, 0, 0.0)):
        expected = torch.ones(rows, 8)
        expected[0] = 1e4
        found = expected.clone()
        found[wrong] = 0
        assert decibels((expected, found, 1)) == pytest.approx(answer, abs=1e-3)
        assert decibels((expected.t(), found.t(), 0)) == decibels((expected, found, 1))


def test_decibels_at_the_edges():
    nan, inf = math.nan, math.inf
    for exact, rounded, answer in (
        (1.0, 1.0, MOST),
        (1.0, nan, LEAST),
        (1.0, inf, LEAST),
        (1.0, 1e18, LEAST),
        (0.0, 1.0, None),
        (nan, 1.0, None),
    ):
        pair = torch.full((3, 4), exact), torch.full((3, 4), rounded)
        assert decibels((*pair, 1)) == answer
    for exact, rounded, share in (
        ([10.0], [9.0], 0.01),
        (10.0, 9.0, 0.01),
        ([[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.9], [5.0, 0.0]], 0.005),
    ):
        found = decibels((torch.tensor(exact), torch.tensor(rounded), 1))
        assert found == pytest.approx(-10 * math.log10(share), abs=1e-4)


def test_tensors_together():
    """Hardly any signal does not count in the sum, and counts as one slice in the mean."""
    large, small = torch.ones(9, 8), torch.full((1, 8), 1e-3)
    of_small = decibels((large, large, 1), (small, torch.zeros(1, 8), 1))
    of_large = decibels((large.t(), 0.9 * large.t(), 0), (small, small, 1))
    assert (of_small, of_large) == pytest.approx((10, 20), abs=1e-3) and decibels() is None


def test_what_a_reading_has_and_what_is_below():
    reading = Reading(output=12.0, weight_gradient=7.5)
    assert reading.values() == {"output": 12.0, "weight_gradient": 7.5}
    bounds = Bounds(output=12.5, input_gradient=3, weight_gradient=7.5)
    assert bounds.broken(reading) == ["output 12.0 dB, below 12.5"]
    assert not bounds.broken(Reading())
    for value in (math.nan, "12", None):
        message = f"output is {value!r}; it must be a number of decibels"
        with pytest.raises(ValueError, match=message):
            Bounds(output=value)


SHAPE = {"hidden": 32, "heads": 2, "feed_forward": 48}


def samples_of(
    module: nn.Module, *inputs, rows: int = 8, call=None
) -> list[tuple[Sample, list[torch.Tensor]]]:
    """Of one pass, which goes back: (sample, gradients of its program's results)."""
    found = []

    def see(seen, program, tensors, outputs):
        sample = Sample.of(program, tensors, rows, seen.target)
        outputs[0].grad_fn.register_prehook(
            lambda gradients: found.append((sample, list(gradients)))
        )

    module._watcher = see
    results = (call or module)(*inputs)
    result = results[0] if isinstance(results, tuple) else results
    (result * torch.linspace(0.5, 2, result.numel()).view_as(result)).sum().backward()
    module._watcher = None
    return found


def linear(**options) -> QuantizedLinear:
    torch.manual_seed(1)
    return QuantizedLinear(48, 64, **options)


@pytest.mark.parametrize(
    ("rows", "taken"), [(5, [0, 4, 9, 13, 18]), (23, list(range(23))), (99, list(range(23)))]
)
def test_rows_of_a_projection_are_from_all_over(rows, taken):
    """Copies of what the batch brings, which may be gone when it goes back; not of codes."""
    layer, x = linear(), torch.randn(23, 48)
    ((sample, _),) = samples_of(layer, x.requires_grad_(), rows=rows)
    tensors = sample.tensors
    assert sample.rows.tolist() == taken
    assert torch.equal(tensors["x"], x[taken]) and tensors["x"].data_ptr() != x.data_ptr()
    assert tensors["input_clip"].data_ptr() != layer.input_clip.data_ptr()
    codes = layer.weight_state.kept["weight.codes"]
    assert tensors["weight.codes"].data_ptr() == codes.data_ptr()


def test_a_sample_computes_what_the_pass_did():
    """Of all rows: the same codes, and the same numbers at random."""
    layer, x = linear(), torch.randn(9, 48, requires_grad=True)
    ((sample, gradients),) = samples_of(layer, x, rows=9)
    found = sample._run(sample.program, gradients)
    assert torch.equal(found[0], layer.eval()(x))
    assert torch.equal(found["x"], x.grad)
    for name, parameter in layer.named_parameters():
        assert not parameter.requires_grad or torch.equal(found[name], parameter.grad), name


def test_sentences_are_whole():
    config = LayerConfig(**SHAPE, rotary=Rotary(positions=7))
    layer, x = TransformerEncoderLayer(config), torch.randn(7, 5, 32, requires_grad=True)
    padding = torch.arange(7) >= torch.tensor([3, 4, 7, 1, 6])[:, None]
    for rows, count, taken in ((1, 1, 3), (7, 2, 7), (8, 3, 14), (100, 5, 21)):
        ((sample, _),) = samples_of(layer, x, padding, rows=rows)
        assert sample.tensors["x"].shape == (taken, 32)
        assert sample.tensors["cu_seqlens"].tolist() == [0, 3, 7, 14, 15, 21][: count + 1]
        # whole, though it has as many rows as a sentence
        assert sample.tensors["rotation"].shape[0] == 7


def test_sentences_and_their_memory():
    layer = TransformerDecoderLayer(LayerConfig(**SHAPE))
    x, memory = torch.randn(3, 4, 32, requires_grad=True), torch.randn(5, 4, 32, requires_grad=True)
    ((sample, gradients),) = samples_of(layer, x, memory, rows=6)
    assert sample.tensors["x"].shape[0] == 6 and sample.tensors["memory"].shape[0] == 10
    assert torch.equal(sample.tensors["memory"][5:], memory[:, 1].detach())
    assert set(sample.reading(gradients).values()) == set(QUANTITIES)


CONFIG = LayerConfig(**SHAPE, dropout=0.3, activation_dropout=0.2, attention_dropout=0.1)
MODULES = {
    "linear": lambda: linear(bias=False),
    "encoder layer": lambda: TransformerEncoderLayer(CONFIG),
    "gated": lambda: FeedForward(LayerConfig(**SHAPE, gated=True, activation="silu")),
    "attention": lambda: MultiheadAttention(CONFIG),
    "logits": lambda: VocabularyProjection(37, 32),
    "loss": lambda: VocabularyProjection(37, 32),
}


@pytest.mark.parametrize("name", MODULES)
def test_readings(name):
    """Dropout falls on the same values in both, so that noise is that of rounding."""
    torch.manual_seed(2)
    shape = (23, 48) if name == "linear" else (7, 3, 32)
    layer, x = MODULES[name](), torch.rand(*shape, requires_grad=True)
    call = (lambda x: layer.loss(x, x[..., 0].long())) if name == "loss" else layer
    ((sample, gradients),) = samples_of(layer, x, call=call)
    reading = sample.reading(gradients).values()
    assert set(reading) == set(QUANTITIES)
    assert 15 < reading["output"] < 90 and 5 < min(reading.values())
    assert max(reading["input_gradient"], reading["weight_gradient"]) < 60


def test_what_is_read_is_the_noise(monkeypatch):
    """Against an independent one: of codes and their scales, multiplied in float64."""
    layer = linear(bias=False, quant=QuantConfig(backward="float"))
    x = torch.randn(6, 48, requires_grad=True)
    ((sample, gradients),) = samples_of(layer, x, rows=6)
    clip, weight_clip = layer.input_clip.double(), layer.weight_clip.double()[:, None]
    rounded = [
        ((tensor.detach().double() / bound).clamp(-1, 1) * 127).round() / 127 * bound
        for tensor, bound in ((x, clip), (layer.weight, weight_clip))
    ]
    exact = x.detach().double() @ layer.weight.detach().double().t()
    noise = rounded[0] @ rounded[1].t() - exact
    rows = (noise.square().sum(1) / exact.square().sum(1)).mean()
    share = torch.maximum(rows, noise.square().sum() / exact.square().sum())
    assert sample.reading(gradients).output == pytest.approx(-10 * share.log10().item(), abs=0.01)


def test_what_has_no_gradient_has_no_reading():
    layer = linear()
    ((sample, gradients),) = samples_of(layer, torch.randn(9, 48))
    assert set(sample.reading(gradients).values()) == {"output", "weight_gradient"}
    layer.requires_grad_(False)
    ((sample, gradients),) = samples_of(layer, torch.randn(9, 48, requires_grad=True))
    assert set(sample.reading(gradients).values()) == {"output", "input_gradient"}
    assert set(sample.reading(None).values()) == {"output"}
    ((sample, _),) = samples_of(linear(), torch.randn(9, 48, requires_grad=True))
    for gradient in (None, torch.full((9, 64), torch.nan)):
        assert set(sample.reading([gradient]).values()) == {"output"}


def test_a_sample_disturbs_nothing():
    layer, x = linear(), torch.randn(9, 48)
    twin, leaf, other = copy.deepcopy(layer), *(x.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(4)
    ((sample, gradients),) = samples_of(layer, leaf)
    sample.reading(gradients)
    after = torch.rand(1)
    torch.manual_seed(4)
    y = twin(other)
    (y * torch.linspace(0.5, 2, y.numel()).view_as(y)).sum().backward()
    assert torch.equal(after, torch.rand(1)) and torch.equal(leaf.grad, other.grad)
    for one, another in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, another)
        assert one.grad is another.grad is None or torch.equal(one.grad, another.grad)
