"""Inputs on another device than the parameters, and parameters on another than what PyTorch makes
by default."""

import pytest
import torch

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear


@pytest.mark.parametrize("training", [False, True])
def test_inputs_elsewhere_are_refused(training):
    layer = QuantizedLinear(16, 16, quant=QuantConfig()).train(training)
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
        layer = QuantizedLinear(48, 208, quant=QuantConfig())
        x = torch.randn(rows, 48, requires_grad=True)
        with torch.device(default):
            for _ in range(3):
                layer(x).square().sum().backward()
            return [x.grad, *layer.state_dict().values()]

    assert all(map(torch.equal, trained("meta"), trained("cpu")))
