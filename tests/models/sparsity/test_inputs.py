"""Mean squares of what products read, against the inputs themselves."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.observe import mean_squares
from tests.layers.shapes import HIDDEN, config_of


@pytest.mark.parametrize(
    "quant", [QuantConfig(), QuantConfig(weight_format="int4"), QuantConfig(mode="float")]
)
def test_of_a_projection_over_two_passes(quant):
    torch.manual_seed(1)
    layer = QuantizedLinear(48, 32, quant=quant)
    batches = [torch.randn(rows, 48) * torch.linspace(0, 2, 48) for rows in (41, 7)]
    layer(batches[0])
    found = mean_squares([layer], lambda: [layer(x) for x in batches])
    x = torch.cat(batches).double()
    if quant.quantized:
        scale = layer.input_clip.detach() / 127
        x = (x / scale).clamp(-127, 127).round() * scale
    assert found.keys() == {layer} and found[layer].keys() == {"weight"}
    assert found[layer]["weight"].dtype == torch.float32
    torch.testing.assert_close(
        found[layer]["weight"], x.square().mean(0).float(), rtol=1e-4, atol=1e-6
    )
    assert layer._observer is None


def test_of_all_products_of_a_layer():
    layer = TransformerEncoderLayer(config_of(mode="float"))
    found = mean_squares([layer], lambda: layer(torch.randn(5, 2, HIDDEN)))[layer]
    assert {name: len(one) for name, one in found.items()} == {
        "self_attn.qkv_weight": HIDDEN,
        "self_attn.out_weight": HIDDEN,
        "feed_forward.fc1_weight": HIDDEN,
        "feed_forward.fc2_weight": layer.config.feed_forward,
    }
    assert all((one > 0).any() for one in found.values())


def test_who_looked_before_goes_on_when_the_batch_fails():
    layer = QuantizedLinear(16, 16)
    layer._observer = before = object()
    with pytest.raises(ZeroDivisionError):
        mean_squares([layer], lambda: 1 / 0)
    assert layer._observer is before
