"""Weights of 4 bits in groups: the search for multipliers, loops and kernels, and layers that
train with them."""

import copy
import math
from functools import partial

import pytest
import torch

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer, VocabularyProjection
from lsq.layers.memory import plan_memory
from lsq.ops.rounding import RoundWeight, UnpackWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from lsq.run.backends import backend
from tests.layers.shapes import config_of
from tests.ops.compare import compare, empty, refused
from tests.ops.cuda import compare_cuda
from tests.quant.fake import dequantize

INT4 = WEIGHT_FORMATS["int4"](8, Grain.ROW)


def rounded(values, clip, rows=None, compare=compare):
    """The weight after both loops or kernels, each of which agrees with its reference exactly:
    (decoded [N, K], weight)."""
    form = WEIGHT_FORMATS["int4"](8, Grain.ROW if len(clip) == len(values) else Grain.TENSOR)
    (count, columns), rows = values.shape, rows or len(values)
    stored = empty(rows, form.stored_columns(columns), dtype=torch.int8)
    weight = Weight(format=form, codes=stored, scale=empty(rows), values=values, clip=clip)
    weight = compare(RoundWeight(weight=weight)).weight
    reference, scale = form.encode(values, clip)
    assert torch.equal(weight.codes[:count], reference)
    assert torch.equal(weight.scale[:count].nan_to_num(-1.0), scale.nan_to_num(-1.0))
    codes = empty(rows, columns, dtype=torch.int8)
    codes = compare(UnpackWeight(weight=weight.bare(), codes=codes)).codes
    assert torch.equal(codes, form.unpack(weight.codes, columns))
    assert not codes[count:].any() and (weight.scale[count:] == 1).all()
    return codes[:count].float() * weight.scale[:count, None], weight


def on_cuda(values, clip, rows):
    """The weight by kernels, which make the CPU's bytes."""
    return rounded(values, clip, rows, partial(compare_cuda, exact=True))[1]


def snr(values, decoded):
    """Signal-to-noise in dB."""
    return 10 * math.log10(values.square().sum() / (values - decoded).square().sum())


def by_hand(group, step):
    """The best [32] of all multipliers within the four, one by one, from the definition and in
    float64."""
    x = (group.double() / step).clamp(-120, 120)
    top = x[x.abs().argmax()]
    first = max(math.ceil(top.abs() / 8), 1)
    tried = [max(first - less, 1) * (-1 if top > 0 else 1) for less in range(4)]
    decoded = [m * (x / m).round().clamp(-8, 7) for m in tried]
    return min(decoded, key=lambda one: (one - x).square().sum()) * step


@pytest.mark.parametrize("columns", [1, 16, 31, 32, 33, 48, 512])
@pytest.mark.parametrize("clips", [1, 9])
def test_loops_are_the_reference_at_every_length(columns, clips):
    values = torch.randn(9, columns) * torch.rand(9, 1) * 3
    rounded(values, 0.5 + torch.rand(clips), rows=16)


def test_groups_are_rounded_as_defined():
    values, clip = torch.randn(16, 96), torch.full((16,), 3.0)
    decoded, _ = rounded(values, clip)
    for row, found in zip(values, decoded, strict=True):
        for group, one in zip(row.split(32), found.split(32), strict=True):
            wanted = by_hand(group, 3.0 / 120)
            assert (one - group).square().sum() <= 1.01 * (wanted - group).square().sum()


def test_what_every_code_and_multiplier_comes_back_as():
    step, q = 0.5, torch.arange(-8, 8.0)
    for m in [*range(-15, 0), *range(1, 16)]:
        decoded, weight = rounded((m * q * step).repeat(2)[None], torch.tensor([120 * step]))
        assert torch.equal(decoded, (m * q * step).repeat(2)[None]) and weight.codes[0, 0] == m


def test_bytes():
    assert INT4.stored_columns(512) == 512 // 2 + 512 // 32 and INT4.stored_columns(48) == 34
    layer = QuantizedLinear(512, 64, quant=QuantConfig(weight_format="int4")).eval()
    layer(torch.randn(3, 512))
    assert sorted(codes.nbytes for codes in layer.weight_state.kept.values()) == [
        4 * 64,
        64 * 512 * 17 // 32,
    ]


@pytest.mark.parametrize(
    "value, back", [(math.inf, 1.2), (-math.inf, -1.2), (0.0, 0.0), (1e-42, 0.0)]
)
def test_values_at_the_ends(value, back):
    decoded, _ = rounded(torch.full((1, 40), value), torch.tensor([1.2]))
    assert torch.allclose(decoded, torch.full((1, 40), back))


@pytest.mark.parametrize("clips", [1, 7])
def test_nan_poisons_what_shares_its_clip(clips):
    values = torch.randn(7, 48)
    values[3, 40] = math.nan
    _, weight = rounded(values, torch.ones(clips))
    assert weight.scale.isnan().nonzero().flatten().tolist() == (
        [3] if clips == 7 else list(range(7))
    )


def test_signal_to_noise_on_gaussian_weights():
    """Better than 4 bits under one scale a row by 2.3 dB, and than float scales for symmetric
    groups by 0.5."""
    values = torch.randn(64, 512)
    decoded, _ = rounded(values, quant.calibrate(values, "mse", INT4.bits, per_channel=True))
    plain = dequantize(
        *quant.quantize(values, quant.calibrate(values, "mse", 4, per_channel=True), 4)[:2]
    )
    groups = values.view(64, 16, 32)
    shares = (
        torch.linspace(0.6, 1.2, 61)[:, None, None, None] * groups.abs().amax(2, keepdim=True) / 7
    )
    floats = (groups / shares).round().clamp(-7, 7) * shares
    best = (floats - groups).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    floats = floats.gather(0, best.expand(1, -1, -1, 32)).view(64, 512)
    assert snr(values, decoded) > max(snr(values, plain) + 2.3, snr(values, floats) + 0.5)


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "clip_gradient": "lsq"}]
)
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_gradients_are_straight_through(options, granularity):
    """Against autograd on a composite in float64: what is within the clip moves, what is outside
    moves the clip."""
    layer = QuantizedLinear(
        48, 32, quant=QuantConfig(weight_format="int4", weight_granularity=granularity, **options)
    )
    layer(torch.randn(41, 48))
    layer.load_state_dict(layer.state_dict() | {"weight_clip": 0.7 * layer.weight_clip.detach()})
    x, given = torch.randn(41, 48), torch.randn(41, 32)
    layer(x).mul(given).sum().backward()
    values, clip = (one.detach() for one in (layer.weight, layer.weight_clip))
    form = layer.quant.weights
    stored, scale = form.encode(values, clip)
    decoded = (form.unpack(stored, 48) * scale[:, None]).double()
    codes, of_x, _ = quant.quantize(x, layer.input_clip.detach())
    product = given.double().t() @ dequantize(codes, of_x).double()
    outside, limit = values.abs() > clip[:, None], clip[:, None].double()
    assert outside.any()
    slope = torch.where(outside, values.sign().double(), 0.0)
    factor = 1.0
    if layer.quant.clip_gradient == "lsq":
        slope = torch.where(outside, slope, (decoded - values) / limit)
        factor = (values.numel() // clip.numel() * 127) ** -0.5
    wanted, of_clip = (
        product.masked_fill(outside, 0.0),
        (product * slope * factor).view(len(clip), -1).sum(1),
    )
    loose = 0.03 if layer.quant.backward == "int8" else 1e-5
    assert (layer.weight.grad - wanted).norm() <= loose * wanted.norm()
    assert (layer.weight_clip.grad - of_clip).norm() <= 2 * loose * of_clip.norm()


def same_on(backends, sentences, tolerance, backward) -> None:
    """A layer computes and learns the same."""
    torch.manual_seed(0)
    config = config_of(weight_format="int4", backward=backward, clip_gradient="lsq")
    layers = [TransformerEncoderLayer(config)]
    layers.append(copy.deepcopy(layers[0]))
    for count in sentences:
        x, results = torch.randn(9, count, config.hidden), []
        for layer, name in zip(layers, backends, strict=True):
            layer.backend = backend(name)
            layer.zero_grad()
            torch.manual_seed(1)
            y = layer(x)
            y.square().sum().backward()
            results.append([y, *(parameter.grad for parameter in layer.parameters())])
        for found, wanted in zip(*results, strict=True):
            assert (found - wanted).norm() <= tolerance * wanted.norm() + tolerance / 50


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_a_layer_is_the_same_on_both_backends(backward):
    same_on(("cpu", "reference"), (3,), 0.02, backward)


@pytest.mark.thorough
@pytest.mark.parametrize("backward", ["int8", "float"])
def test_a_layer_trains_as_on_the_cpu_on_cuda(backward):
    """27 rows, whose products read weights as they are stored, and 81."""
    same_on(("emulated", "cpu"), (3, 9), 0.05, backward)


def test_planned_memory_changes_nothing():
    """Unpacked codes lie in the arena, too; guard mode says so if two tensors share a place at
    once."""
    torch.manual_seed(0)
    config = config_of(weight_format="int4")
    layer, x, found = TransformerEncoderLayer(config), torch.randn(9, 3, config.hidden), []
    layer(x)
    for mode in ("naive", "guard"):
        plan_memory(layer, lambda: layer(x).square().sum(), mode=mode)
        torch.manual_seed(1)
        y = layer(x)
        found.append(
            [y.detach().clone(), *torch.autograd.grad(y.square().sum(), [*layer.parameters()])]
        )
    assert all(map(torch.equal, *found))


def test_training_learns_and_goes_on_from_a_checkpoint():
    """A small classifier from words, twice: straight on, and by way of its state dict."""
    torch.manual_seed(0)
    quantization = QuantConfig(weight_format="int4")
    x, target = torch.randn(256, 48), torch.randint(0, 33, (256,))

    def model():
        layers = (
            QuantizedLinear(48, 64, quant=quantization),
            VocabularyProjection(33, 64, quant=quantization),
        )
        return torch.nn.ModuleList(layers)

    def train(layers, optimizer, updates):
        for _ in range(updates):
            optimizer.zero_grad()
            loss, _ = layers[1].loss(layers[0](x).relu(), target)
            loss.backward()
            optimizer.step()
        return loss.item()

    first = model()
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    before = train(first, optimizer, 1)
    train(first, optimizer, 19)
    second = model()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    another = torch.optim.Adam(second.parameters(), lr=0.01)
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses = []
    for layers, used in ((first, optimizer), (second, another)):
        torch.manual_seed(2)
        losses.append(train(layers, used, 20))
    assert losses[0] == losses[1] < 0.3 * before
    first.eval(), second.eval()
    assert torch.equal(first[0](x), second[0](x))


@pytest.mark.parametrize("columns", [16, 32, 48, 80, 272])
@pytest.mark.parametrize("clips", [1, 33])
def test_kernels_make_the_bytes_of_the_cpu_on_cuda(columns, clips):
    on_cuda(torch.randn(33, columns) * torch.rand(33, 1) * 3, 0.5 + torch.rand(clips), 48)


def test_every_code_under_every_multiplier_on_cuda():
    q = torch.arange(-8, 8.0).repeat(2)
    multipliers = [*range(-15, 0), *range(1, 16)]
    ends = torch.tensor([math.inf, -math.inf]).repeat(16)
    weight = on_cuda(
        torch.stack([*(m * q / 2 for m in multipliers), 0 * q, ends]), torch.tensor([60.0]), 32
    )
    assert weight.codes[:30, 0].tolist() == multipliers


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_poisons_what_shares_its_clip_on_cuda(clips):
    values = torch.randn(41, 48)
    values[3, 2], values[29, 47], values[30, 0] = math.nan, math.nan, math.inf
    assert on_cuda(values, torch.ones(clips), 48).scale.isnan().sum() == (2 if clips > 1 else 41)


def turns():
    """Three turns of each loop where two blocks stride: rows and their groups, padding, and scales
    that NaN poisons."""
    for rows, columns, padded in ((41, 144, 48), (3, 208, 64), (800, 16, 800)):
        values = torch.randn(rows, columns)
        values[-1, 5] = math.nan
        on_cuda(values, torch.ones(1), padded)


def test_sizes_that_no_product_takes_are_refused_on_cuda():
    with refused("width of a weight is 40.*multiple of 16"):
        on_cuda(torch.randn(16, 40), torch.ones(1), 16)
    with refused("padded number of rows is 33.*multiple of 16"):
        on_cuda(torch.randn(33, 48), torch.ones(1), 33)
