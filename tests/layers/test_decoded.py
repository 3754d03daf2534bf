"""Layers in formats without fast products: values in the place of codes; names in patterns."""

import copy

import pytest
import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import (
    QuantizedLinear,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
    programs,
    weight_state,
)
from lsq.layers.linear import ALONE, linear
from lsq.layers.model_formats import decoded_summary, tensor_names
from lsq.native import tiles
from lsq.ops.fake_quantize import FakeQuantize, pack_weight
from lsq.quant.declared import declare
from lsq.quant.numbers import find_number, scaled_format
from lsq.run.backends import CPU, Backend, backend
from lsq.run.cuda import CUDA
from tests.layers.examples import SENTENCES, SOURCE, mode_on
from tests.layers.shapes import HEADS, HIDDEN, INNER
from tests.ops.cuda import current_device
from tests.sampling import first

FORMATS = (
    ("nvfp4", "nvfp4", "int8"),
    ("int6/row", "int8", "fp8-e5m2/row"),
    ("float32", "log4.3/tensor", "float32"),
    ("int4/group32", "float32", "int8"),
    ("int8", "int8", "nvfp4"),
)


def config(formats: tuple[str, str, str], hidden: int = 36, **options) -> LayerConfig:
    options = {"heads": 4, "feed_forward": 56, **options}
    return LayerConfig(**options, hidden=hidden, dropout=0.1, quant=quant_of(*formats))


def quant_of(weight: str, activation: str, gradient: str = "int8", **options) -> QuantConfig:
    formats = {"activation_format": activation, "gradient_format": gradient}
    return QuantConfig(weight_format=weight, **formats, **options)


def projection(formats: tuple[str, ...], inputs: int = 40, outputs: int = 24) -> QuantizedLinear:
    return QuantizedLinear(inputs, outputs, quant=quant_of(*formats))


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).abs().max() <= 4e-5 * wanted.abs().max() + 1e-6


def case(*arguments, **options) -> tuple[torch.nn.ModuleList, list[torch.Tensor]]:
    """An encoder layer and a decoder layer, and what `results_of` takes for them."""
    torch.manual_seed(0)
    given = config(*arguments, **options)
    layers = torch.nn.ModuleList([TransformerEncoderLayer(given), TransformerDecoderLayer(given)])
    return layers, [torch.randn(length, 3, given.hidden) for length in (7, 5, 7)]


def results_of(layers, given: list[torch.Tensor], where: Backend) -> list[torch.Tensor]:
    """Of copies of the layers on a backend: the result, and every gradient."""
    x, memory, wanted = given
    encoder, decoder = ours = copy.deepcopy(layers)
    encoder.backend = decoder.backend = where
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = decoder(encoder(x), memory)
    (y * wanted).mean().backward()
    return [y.detach(), x.grad, *(one.grad for one in ours.parameters())]


def test_what_is_decoded_is_told():
    layers, _ = case(("int8", "int8,*.context=log4.3/tensor,*key_value=float32", "fp8-e5m2/row"))
    assert decoded_summary(layers) == (
        "multiplied as decoded values, no faster than floats: int8/row (11 weights), int8/tensor"
        " (11 activations), log4.3/tensor (3 activations), fp8-e5m2/row (11 gradients)"
    )
    plain = torch.nn.ModuleList([torch.nn.Linear(2, 2), QuantizedLinear(16, 16)])
    assert decoded_summary(plain) is None
    assert decoded_summary(projection(("nvfp4", "int8"))) == (
        "multiplied as decoded values, no faster than floats: nvfp4 (1 weight), int8/tensor (1"
        " activation)"
    )


GATED = {"pre_norm": True, "activation": "silu", "gated": True}
ON_BOTH = {
    **{f"{'-'.join(one)} post": (one, {}) for one in FORMATS},
    **{f"{'-'.join(one)} gated": (one, GATED) for one in FORMATS},
    # the signs that ReLU keeps, a bit an element: rows that begin within a byte
    **{f"codes, {width}": (FORMATS[0], {"feed_forward": width}) for width in (12, 13)},
    **{f"floats, {width}": (("float32",) * 3, {"feed_forward": width}) for width in (12, 13)},
}


@pytest.mark.parametrize("name", ON_BOTH)
def test_layers_compute_the_same_on_both_backends(name):
    """Encoder and decoder, of widths that are no multiples of 16, forward and backward."""
    formats, options = ON_BOTH[name]
    tested = case(formats, **options)
    results = [results_of(*tested, backend(name)) for name in ("cpu", "reference")]
    assert all(one is not None for one in results[0])
    assert all(map(near, *results))


def differences(found, wanted) -> float:
    """The largest difference of two lists of tensors, relative to the norms of the second."""
    pairs = zip(found, wanted, strict=True)
    return max(((one - other).norm() / (other.norm() + 1e-7)).item() for one, other in pairs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "formats, options, activations, limit",
    [
        (("int6/row", "fp8-e4m3/group16", "int8"), GATED, torch.float32, 5e-2),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                (FORMATS[0], {}, torch.float32, 5e-2),
                (FORMATS[4], {"activation": "gelu", "in_out": True}, torch.float32, 5e-2),
                (("nvfp4", "fp8-e4m3/row", "int8"), {}, torch.bfloat16, 0.25),
            )
        ),
    ],
)
def test_layers_compute_the_reference_on_cuda(formats, options, activations, limit):
    """But for values that lie beside a boundary, where products are summed in another order."""
    tested = case(formats, hidden=HIDDEN, heads=HEADS, feed_forward=INNER, **options)
    where = CUDA(current_device(), activations=activations)
    found, wanted = (results_of(*tested, one) for one in (where, backend("reference")))
    assert differences(found, wanted) <= limit


def trained_projection(number: str, where: Backend) -> list[torch.Tensor]:
    """Results and gradients of three steps of a projection in formats of that number."""
    torch.manual_seed(0)
    formats = {"weight_format": f"{number}/group16/bfloat16", "gradient_format": f"{number}/row"}
    quant = QuantConfig(**formats, activation_format=f"{number}/tensor")
    layer = QuantizedLinear(HIDDEN, 64, quant=quant)
    layer.backend, found = where, []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        y = layer(torch.randn(9, HIDDEN))
        y.square().mean().backward()
        found += [y.detach(), *(one.grad.clone() for one in layer.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_declared_copy_of_a_format_trains_as_that_bit_by_bit():
    copied = declare("copy_of_fp4", find_number("fp4-e2m1").values)
    results = [trained_projection(one, backend("cpu")) for one in ("fp4-e2m1", copied.name)]
    assert all(map(torch.equal, *results)) and any(one.any() for one in results[0])


def test_a_declared_format_trains_as_the_reference_on_cuda():
    declare("seven_of_cuda", (-4, -2, -1, 0, 1, 2, 4))
    places = (CUDA(current_device()), backend("reference"))
    results = [trained_projection("seven_of_cuda", one) for one in places]
    assert differences(*results) <= 5e-2


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_a_vocabulary_and_a_projection_on_cuda(granularity):
    """Loss, logits and gradients; first clips are measured by rounding."""
    options = {"weight_granularity": granularity, "clip_init": "mse"}
    quant, results = quant_of("nvfp4", "fp4-e2m1/row", **options), []
    for where in (CUDA(current_device()), backend("reference")):
        torch.manual_seed(0)
        words = VocabularyProjection(96, HIDDEN, quant=quant)
        layer = QuantizedLinear(HIDDEN, 64, quant=quant)
        words.backend = layer.backend = where
        x = torch.randn(9, HIDDEN, requires_grad=True)
        loss, _ = words.loss(x, torch.arange(9), 0.1)
        (loss + layer(x).square().sum()).backward()
        parameters = [*words.parameters(), *layer.parameters()]
        results.append([loss.detach(), x.grad, *(one.grad for one in parameters)])
        with torch.no_grad():
            results[-1] += [*map(torch.detach, parameters), words.eval()(x), layer.eval()(x)]
    assert differences(*results) <= 2e-2


def test_a_projection_multiplies_decoded_values():
    torch.manual_seed(0)
    layer = projection(("int4/group16", "fp8-e4m3/row", "float32"))
    x = torch.randn(9, 40)
    found = layer(x)
    found.square().sum().backward()
    clip, weight_clip = layer.input_clip.detach(), layer.weight_clip.detach()[:, None]
    bound = torch.clamp(x, -clip, clip)
    form, fp8 = scaled_format("int4/group16"), scaled_format("fp8-e4m3/row")
    values = fp8.decode(fp8.encode(bound))
    weight = form.decode(form.encode(torch.clamp(layer.weight.detach(), -weight_clip, weight_clip)))
    wanted = values @ weight.t() + layer.bias
    torch.testing.assert_close(found, wanted)
    inside = layer.weight.abs() <= weight_clip
    torch.testing.assert_close(
        layer.weight.grad, torch.where(inside, (2 * wanted).t() @ values, 0.0)
    )


def test_weights_are_decoded_once_in_eval_mode(monkeypatch):
    quant = quant_of("nvfp4", "float32", clip_init="fixed")
    layer = VocabularyProjection(21, 36, quant=quant).eval()
    x, runs = torch.randn(4, 36), []
    monkeypatch.setattr(
        FakeQuantize, "cpu", lambda self: (runs.append(self), self.store(self.reference()))
    )
    first = layer(x)
    assert layer(x).equal(first) and len(runs) == 1
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert not layer(x).equal(first) and len(runs) == 2


GROUPED = (
    ("nvfp4", "nvfp4"),
    ("mxint8", "mxint8"),
    ("mxfp4", "mxfp4"),
    ("vsquant4", "vsquant4"),
    ("int4/group32", "int8"),
    ("int6/row", "int8/row"),
    ("nf4/group32", "int8/row"),
    ("int3/group32/bfloat16", "float32"),
    ("nf4/group64", "float32"),
    ("ternary/row", "float32"),
)
"""Of weights and activations: what is multiplied as packed fields in eval mode."""
fast = pytest.mark.skipif(not tiles.vectorised(), reason="plain C++ multiplies decoded values")


class Decoding(CPU):
    """The CPU without products of codes with scales of groups."""

    multiplies_groups = False


@fast
@pytest.mark.parametrize("formats", GROUPED, ids="-".join)
@pytest.mark.parametrize(
    "options", first([GATED, {}, {"in_out": True}], 1), ids=["gated", "post", "in_out"]
)
@torch.no_grad()
def test_codes_in_eval_mode_give_what_decoded_values_give(formats, options):
    """But for values that lie beside a boundary, where sums before them were rounded otherwise."""
    layers, (x, memory, _) = case((*formats, "int8"), **options)
    layers[1](layers[0](x), memory)  # measures clips
    results, kept = [], []
    for where in (None, Decoding(), backend("reference")):
        encoder, decoder = ours = copy.deepcopy(layers).eval()
        encoder.backend = decoder.backend = where
        results.append(decoder(encoder(x), memory))
        kept.append({name.rpartition(".")[2] for layer in ours for name in layer.weight_state.kept})
    assert kept == [{"grouped"}, {"decoded"}, {"decoded"}]
    assert differences(results[1:], results[:1] * 2) <= 2e-2


@fast
@pytest.mark.parametrize("formats", GROUPED, ids="-".join)
@pytest.mark.parametrize(
    "rows, inputs, outputs", [(1, 1, 1), (1, 40, 64), (7, 37, 33), (65, 130, 5)]
)
@torch.no_grad()
def test_a_projection_in_eval_mode(formats, rows, inputs, outputs):
    torch.manual_seed(rows)
    layer, x = projection(formats, inputs, outputs), torch.randn(rows, inputs)
    layer(x)
    found = layer.eval()(x)
    layer.backend = Decoding()
    assert near(found, layer(x)) and set(layer.weight_state.kept) == {
        "weight.grouped",
        "weight.decoded",
    }


@pytest.mark.parametrize(
    "formats",
    [("nvfp4", "mxint8"), ("fp8-e4m3/row", "int8"), ("fp8-e4m3/row", "float32")],
    ids="-".join,
)
@torch.no_grad()
def test_formats_without_a_common_product_stay_decoded(formats):
    layer, x = projection(formats), torch.randn(3, 40)
    layer(x)
    layer.eval()(x)
    assert set(layer.weight_state.kept) == {"weight.decoded"}


@fast
@torch.no_grad()
def test_nan_in_a_row_stays_there_in_eval_mode():
    layer, x = projection(("nvfp4", "int8")), torch.randn(5, 40)
    layer(x)
    x[2, 3] = torch.nan
    assert torch.equal(layer.eval()(x).isnan().all(1), torch.arange(5) == 2)


@fast
def test_a_weight_is_packed_once_in_eval_mode(monkeypatch):
    layer, x, packed = projection(("nvfp4", "nvfp4"), 36, 21), torch.randn(4, 36), []
    layer(x)
    layer.eval()
    monkeypatch.setattr(
        weight_state, "pack_weight", lambda *given: (packed.append(given), pack_weight(*given))
    )
    with torch.no_grad():
        first = layer(x)
        assert layer(x).equal(first) and len(packed) == 1
        layer.weight.mul_(0.5)
        assert not layer(x).equal(first) and len(packed) == 2
        second = layer(x)
        layer.weight_clip.mul_(0.5)
        assert not layer(x).equal(second) and len(packed) == 3
    layer(x).sum().backward()  # with decoded values
    assert layer.weight.grad is not None


@fast
@torch.no_grad()
def test_groups_beyond_the_last_input_take_no_memory():
    layer, x = projection(("int8/group1024", "int8/row"), 40, 21), torch.randn(4, 40)
    wanted = layer(x)
    assert near(layer.eval()(x), wanted)
    (packed,) = layer.weight_state.kept.values()
    assert packed.numel() < 5 * layer.weight.numel()


def test_the_loss_of_a_vocabulary_and_its_logits_agree():
    torch.manual_seed(0)
    layer = VocabularyProjection(21, 36, quant=quant_of("nvfp4", "log4.3/tensor", "float32"))
    x, target = torch.randn(6, 36, requires_grad=True), torch.randint(0, 21, (6,))
    loss, _ = layer.loss(x, target, 0.0)
    (gradient,) = torch.autograd.grad(loss, x)
    wanted = torch.nn.functional.cross_entropy(layer(x), target, reduction="sum")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, x)[0])


def test_state_dicts_hold_the_clips_and_no_values():
    layer = projection(("int6/tensor", "float32"))
    layer(torch.randn(2, 40))
    assert layer.weight_clip.shape == (1,)
    state = set(layer.state_dict()) - {"passes", "calibrated", "float_fallback", "format"}
    assert state == {"weight", "weight_clip", "bias"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight_format": "nvfp5"}, "did you mean nvfp4"),
        ({"activation_format": "int8/group"}, "no grain is called 'group'"),
        ({"gradient_format": "nvfp4", "backward": "float"}, "rounds no gradients"),
        ({"weight_format": "nvfp4", "clip_gradient": "lsq"}, 'take "pact"'),
        ({"weight_format": "int4", "activation_format": "nvfp4"}, "int4 weights go with int8"),
        ({"weight_format": 4}, "weight_format is 4"),
    ],
)
def test_what_does_not_go_together_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**given)


# Names of what is rounded


def names_of(program):
    return tensor_names(program, lambda name: [name])


@pytest.mark.parametrize("form", ["int8", "nvfp4", "float32"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_activations_are_called_as_the_weights_that_read_them_too(form, pre_norm):
    given = config((form, form, "int8"), 32, gated=True, pre_norm=pre_norm, feed_forward=48)
    program = programs.decoder_layer(given, SENTENCES, SOURCE, mode_on())
    weights, activations = names_of(program)
    assert list(activations.values()) == [
        ["self_attn.input", "self_attn.qkv_weight"],
        ["self_attn.qkv"],
        ["self_attn.context", "self_attn.out_weight"],
        ["encoder_attn.input", "encoder_attn.query_weight"],
        ["encoder_attn.memory", "encoder_attn.key_value_weight"],
        ["encoder_attn.key_value"],
        ["encoder_attn.query"],
        ["encoder_attn.context", "encoder_attn.out_weight"],
        ["feed_forward.input", "feed_forward.gate_weight", "feed_forward.up_weight"],
        ["feed_forward.gate"],
        ["feed_forward.up"],
        ["feed_forward.activation", "feed_forward.fc2_weight"],
    ]
    assert {name for _, *read in activations.values() for name in read} == weights.keys()


@pytest.mark.parametrize("form", ["int8", "nvfp4"])
def test_names_of_one_product(form):
    """int4 weights are unpacked before a product reads them."""
    quant = quant_of(form, form)
    for program in (
        linear(quant, 3, 16, 32, mode_on(), bias=True),
        linear(quant_of("int4", "int8"), 3, 16, 32, mode_on(), bias=True),
        programs.vocabulary_logits(quant, 3, 48, 16, mode_on()),
    ):
        assert names_of(program) == ALONE
