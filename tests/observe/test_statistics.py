"""observe() against direct computation, and the names under which tensors are found."""

import dataclasses

import pytest
import torch
from torch import nn

from lsq import quant
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import (
    Embedding,
    FeedForward,
    QuantizedLinear,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
)
from lsq.observe import observe, quantized_tensors
from lsq.run.cuda import CUDA, emulated_device
from tests.constants import quant_with
from tests.layers.oracle import recorded
from tests.layers.shapes import HIDDEN, config_of


class Model(nn.Module):
    """A little of everything, as a translation model nests it."""

    def __init__(self, **quantization):
        super().__init__()
        config = config_of(**quantization)
        self.embedding = Embedding(33, HIDDEN, 1)
        self.layers = nn.ModuleList(
            [TransformerEncoderLayer(config), TransformerDecoderLayer(config)]
        )
        self.output = VocabularyProjection(
            33, HIDDEN, quant=config.quant, weight=self.embedding.weight
        )

    def forward(self, tokens):
        encoded = self.layers[0](self.embedding(tokens))
        return self.output(self.layers[1](self.embedding(tokens), encoded))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_one_layer_against_direct_computation(bits, granularity):
    form = QuantConfig(bits=bits, weight_granularity=granularity, clips="learned")
    layer, x = QuantizedLinear(32, 16, quant=form), torch.randn(41, 32)
    layer(x)
    smaller = {name: 0.7 * t if "clip" in name else t for name, t in layer.state_dict().items()}
    layer.load_state_dict(smaller)
    with observe(layer) as found:
        layer(x)
    assert found.keys() == {"input", "weight"}
    for name, kind, tensor, clip in (
        ("input", "activation", x, layer.input_clip),
        ("weight", "weight", layer.weight, layer.weight_clip),
    ):
        codes, _, clipped = quant.quantize(tensor.detach(), clip.detach(), bits)
        statistics, outside = found[name], clipped.float().mean().item()
        assert statistics.kind == kind and outside > 0
        assert statistics.clip == pytest.approx(clip.mean().item())
        assert statistics.clipped_share == pytest.approx(outside)
        assert statistics.zero_share == pytest.approx((codes == 0).float().mean().item())
        assert statistics.largest_code == codes.abs().max() == quant.maximum_code(bits)


@pytest.mark.parametrize(
    ("form", "bits", "largest"),
    [
        ("int8", 8, 9),
        ("int8/tensor", 8, 9),
        ("int6/tensor", 6, 2),
        ("int8/group32", None, None),
        ("fp8-e4m3/tensor", None, None),
        ("mxint8", None, None),
        ("nvfp4", None, None),
    ],
)
def test_codes_of_formats_are_counted_by_their_own_limits(form, bits, largest):
    """Values with scales of their own, or finer steps near zero, lose nothing by a wide clip."""
    formats = {"weight_format": form, "activation_format": form}
    layer = QuantizedLinear(32, 16, quant=QuantConfig(**formats, clip_init="absmax"))
    layer(torch.full((1, 32), 127.0))
    layer.eval()
    with observe(layer) as found:
        layer(torch.tensor([[0.0, 5.2, -9.4, 0.0] * 8]))
    given, weight = found["input"], found["weight"]
    assert (given.bits, given.largest_code) == (bits, largest)
    assert (given.clipped_share, given.zero_share, weight.clipped_share) == (0.0, 0.5, 0.0)
    assert (weight.bits, weight.largest_code) == (bits, bits and 2 ** (bits - 1) - 1)


def test_rows_that_have_scales_of_their_own():
    """Rows use all codes, however wide the clip; a gated middle's only follows."""
    formats = {"weight_format": "int8/row", "activation_format": "int8/row"}
    layer = QuantizedLinear(32, 16, quant=QuantConfig(**formats))
    layer(100 * torch.randn(3, 32))
    with observe(layer) as found:
        layer(torch.randn(3, 32))
    assert found["input"].largest_code is found["input"].bits is None and found["weight"].bits == 8
    gated = {"feed_forward": 64, "activation": "silu", "gated": True}
    layer = FeedForward(LayerConfig(hidden=HIDDEN, heads=4, **gated))
    layer(torch.randn(3, 2, HIDDEN))
    layer.eval()
    with observe(layer) as found:
        layer(100 * torch.randn(3, 2, HIDDEN))
    assert found["gate"].clipped_share > 0
    assert found["activation"].clipped_share == 0 and found["activation"].largest_code is None


def test_passes_that_show_little():
    """Of NaN, decoding, whose weights nothing rounds, and layers in floats."""
    formats = {"activation_format": "int8/tensor", "gradient_format": "float32"}
    layer = QuantizedLinear(16, 16, quant=QuantConfig(**formats))
    layer(torch.randn(3, 16))
    layer.eval()
    with observe(layer) as found:
        layer(torch.full((3, 16), torch.nan))
    assert found["input"].largest_code == 0
    layer = QuantizedLinear(16, 16).eval()
    with torch.no_grad(), observe(layer) as found:
        layer(torch.randn(3, 16))
    assert found.keys() == {"input"}
    model = Model(mode="float")
    with observe(model) as found:
        model(torch.randint(2, 33, (3, 7)))
    assert not found and not list(quantized_tensors(model))


def test_every_quantised_tensor_of_a_model_is_seen_under_its_name():
    model = Model()
    with observe(model) as found:
        model(torch.randint(2, 33, (3, 7)))
    names = dict(quantized_tensors(model))
    assert found.keys() == names.keys()
    assert len(names) == 9 + 17 + 2
    assert {
        "layers.0.self_attn.qkv_weight",
        "layers.1.encoder_attn.memory",
        "output.input",
    } <= names.keys()
    for name, clip in names.items():
        assert clip is model.get_parameter(name + "_clip")
        assert found[name].clip == pytest.approx(clip.mean().item())
        assert found[name].kind == ("weight" if name.endswith("weight") else "activation")
        assert 0 <= found[name].clipped_share < 0.2


def test_the_last_pass_inside_counts():
    layer = QuantizedLinear(16, 16, quant=quant_with(calibration_passes=0))
    layer(torch.randn(41, 16))
    with observe(layer) as found:
        assert not found
        layer(torch.zeros(3, 16))
        assert found["input"].zero_share == 1.0
        layer(torch.full((3, 16), 100.0))
    layer(torch.randn(3, 16))
    assert found["input"].clipped_share == 1.0


def test_an_error_inside_ends_the_watching():
    """Who looked before goes on."""
    layer = QuantizedLinear(16, 16)
    layer._observer = before = lambda *_: None
    with pytest.raises(ValueError, match="must be"), observe(layer):
        layer(torch.randn(3, 17))
    assert layer._observer is before
    layer._observer = None
    with recorded(layer) as outcome:
        layer(torch.randn(3, 16))
    assert outcome.codes.keys() == {"input_clip", "weight_clip"}


def test_watching_changes_nothing_in_the_emulator():
    """What was rounded is computed again where the module runs, in its floats."""
    layer = TransformerEncoderLayer(
        dataclasses.replace(config_of(), quant=QuantConfig(clips="absmax"))
    )
    layer.backend = CUDA(emulated_device(), activations=torch.bfloat16)
    x = torch.randn(3, 5, HIDDEN)
    layer(x)
    wanted = layer.eval()(x)
    with observe(layer) as found:
        assert torch.equal(layer(x), wanted)
    assert found["feed_forward.input"].clipped_share < 0.1
