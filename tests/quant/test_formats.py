"""Formats of weights, a packed one of the test's own on its way through layers, and formats by
patterns of names."""

import pytest
import torch

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, VocabularyProjection
from lsq.layers.linear import linear
from lsq.layers.programs import Mode
from lsq.observe import observe
from lsq.ops.rounding import UnpackWeight
from lsq.quant import WEIGHT_FORMATS, Grain, WeightFormat
from lsq.quant.formats import FormatChoice, format_choice
from lsq.quant.numbers import scaled_format
from lsq.run.backends import backend
from tests.ops.compare import refused


class Turned(WeightFormat):
    """Codes from the last to the first, and a byte of nothing behind them."""

    packed = True

    @property
    def unpacked(self):
        return WeightFormat(name="int8", bits=self.bits, grain=self.grain)

    def stored_columns(self, columns):
        return columns + 1

    def encode(self, values, clip):
        codes, scale = super().encode(values, clip)
        return torch.nn.functional.pad(codes.flip(1), (0, 1)), scale

    def unpack(self, stored, columns):
        return stored[:, :columns].flip(1)


@pytest.fixture(autouse=True)
def turned(monkeypatch):
    """The format by that name."""
    monkeypatch.setitem(
        WEIGHT_FORMATS, "turned", lambda bits, grain: Turned(name="turned", bits=bits, grain=grain)
    )


@pytest.mark.parametrize("grain, clips", [(Grain.ROW, 7), (Grain.TENSOR, 1)])
def test_int8_stores_what_products_read(grain, clips):
    form = WEIGHT_FORMATS["int8"](5, grain)
    values, clip = torch.randn(7, 16), 0.5 + torch.rand(clips)
    stored, scale = form.encode(values, clip)
    wanted = quant.quantize(values, clip, 5)
    assert torch.equal(stored, wanted.codes) and torch.equal(scale, wanted.scale.expand(7))
    assert not form.packed and form.stored_columns(16) == 16 and form.unpack(stored, 16) is stored


def test_an_unknown_format_is_refused():
    with refused("weight_format is 'int3': allowed are 'int8', .*'turned'"):
        QuantConfig(weight_format="int3")


def layers(**options):
    """The same layers for the same options but for their format; on the reference, which alone
    knows this one."""
    torch.manual_seed(0)
    config = QuantConfig(clips="learned", **options)
    made = QuantizedLinear(32, 16, quant=config), VocabularyProjection(33, 32, quant=config)
    for layer in made:
        layer.backend = backend("reference")
    return made


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "clip_gradient": "lsq"}]
)
def test_a_packed_format_changes_nothing_that_products_see(options):
    found = []
    for name in ("int8", "turned"):
        linear, vocabulary = layers(weight_format=name, **options)
        torch.manual_seed(1)
        x = torch.randn(5, 32, requires_grad=True)
        loss, _ = vocabulary.loss(x, torch.arange(5))
        with observe(linear) as statistics:
            (loss + linear(x).square().sum()).backward()
        gradients = [
            p.grad for layer in (linear, vocabulary) for p in layer.parameters() if p.requires_grad
        ]
        found.append(([loss, x.grad, *gradients], statistics))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


def test_no_unpacked_codes_wait_for_the_backward_pass():
    mode = Mode(training=True, backward=True, backend=backend("reference"))
    program = linear(QuantConfig(weight_format="turned"), 5, 32, 16, mode, bias=True)
    unpacking = [i for i, one in enumerate(program.operations) if isinstance(one, UnpackWeight)]
    assert len(unpacking) == 2 and unpacking[0] < program.forward_length <= unpacking[1]
    assert all(one.shape != (16, 32) for one in program.saved)
    assert program.weights["weight"].codes.shape == (16, 33)


def test_codes_that_are_kept_are_the_packed_ones():
    linear, _ = layers(weight_format="turned")
    linear.eval()
    linear(torch.randn(5, 32))
    assert {tuple(codes.shape) for codes in linear.weight_state.kept.values()} == {(16, 33), (16,)}


TEXT = "int8,*fc2*=nvfp4, encoder.layers.0.* = float32"


def test_the_last_pattern_that_fits_counts():
    choice = format_choice(TEXT)
    assert choice == FormatChoice("int8", (("*fc2*", "nvfp4"), ("encoder.layers.0.*", "float32")))
    assert choice.of("encoder.layers.1.fc1_weight") == "int8"
    assert choice.of("encoder.layers.1.fc2_weight") == "nvfp4"
    assert choice.of("encoder.layers.0.fc2_weight") == "float32"
    assert choice.of("q", "fc2", "v") == "nvfp4"


def test_a_part_keeps_what_concerns_it():
    fitted = {}
    tensors = {"fc1_weight": ["fc1_weight"], "fc2_weight": ["fc2_weight"]}
    assert format_choice(TEXT).at("encoder.layers.1", tensors, fitted) == "int8,fc2_weight=nvfp4"
    assert fitted == {"*fc2*": {"nvfp4"}}
    assert format_choice(TEXT).at("encoder.layers.0", tensors, fitted) == "float32"
    assert format_choice(TEXT).at("", {"weight": ["weight"]}, fitted) == "int8"
    assert fitted == {"*fc2*": {"nvfp4", "float32"}, "encoder.layers.0.*": {"float32"}}


def test_layers_without_exceptions_are_configured_alike():
    quant = QuantConfig(weight_format=TEXT)
    names = {"weight": ["weight"]}, {"input": ["input"]}
    first, second = (quant.at(f"decoder.layers.{number}.fc1", *names) for number in range(2))
    assert first == second == QuantConfig() and first.coded
    assert quant.at("encoder.layers.0", *names).weight_form("weight") is None
    assert quant.at("decoder.fc2", *names).weight_form("weight") == scaled_format("nvfp4")


@pytest.mark.parametrize("text", ["int8,nvfp4", "*fc2*=nvfp4", "int8,a=b=c", "int8,=nvfp4"])
def test_another_form_is_refused(text):
    with refused("does not say which tensors have which format"):
        format_choice(text)


def test_formats_of_patterns_exist():
    with refused("weight_format is 'int8,a=nvfp5': .*did you mean nvfp4"):
        QuantConfig(weight_format="int8,a=nvfp5")


def test_patterns_that_fit_nothing_are_named():
    with refused("weight_format gives nvfp4 to '\\*fc2\\*', but no tensor .* a.fc1.weight"):
        QuantConfig(weight_format=TEXT).check_fitted(
            {"weight_format": {"encoder.layers.0.*": {"float32"}}},
            {"weight_format": ["a.fc1.weight"]},
        )


def test_weights_of_one_tensor_have_one_format():
    names = (
        {"qkv": ["q", "k", "v"], "out": ["o"]},
        {"input": ["input", "q", "k", "v"], "context": ["context", "o"]},
    )
    assert (
        QuantConfig(weight_format="int8,*.[qkv]=int4").at("a", *names).weight_format
        == "int8,qkv=int4"
    )
    with refused("weight_format gives int8 to a.q, int4 to a.k, int8 to a.v; .* one tensor"):
        QuantConfig(weight_format="int8,*.k=int4").at("a", *names)
    with refused("gradient_format gives int8 to a.q, int8 to a.k, mxint8 to a.v; "):
        QuantConfig(gradient_format="int8,*.v=mxint8").at("a", *names)
    with refused("activation_format gives nvfp4 to the input of a.q, int8 to the input of a.k"):
        QuantConfig(activation_format="int8,*.q=nvfp4").at("a", *names)
    chosen = QuantConfig(activation_format="int8,*.q=nvfp4,*.input=mxint8,*.o=nvfp4").at(
        "a", *names
    )
    assert chosen.activation_format == "mxint8,context=nvfp4"


def test_patterns_that_decide_nothing_are_named():
    quant, fitted = QuantConfig(weight_format="int8,a.*=int4,*.q=int4,a.?=int8"), {}
    quant.at("a", {"q": ["q"]}, {}, fitted)
    with refused("int4 to 'a.\\*', but later patterns give all that it fits int8, since"):
        quant.check_fitted(fitted, {"weight_format": ["a.q"]})
    quant.at("a", {"out": ["out"]}, {}, fitted)
    with refused("int4 to '\\*.q', but later patterns"):
        quant.check_fitted(fitted, {"weight_format": ["a.q", "a.out"]})
