"""A layer's backward pass with gradients that are rounded, or shown, on the way."""

import math

import pytest
import torch
from gradient_backend import Rounding, Showing
from gradient_scales import KEPT, Study, decibels, summary
from gradient_schemes import SCHEMES

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import TransformerEncoderLayer
from lsq.run.backends import backend

PRODUCTS = ["feed_forward.fc2", "feed_forward.fc1", "self_attn.out", "self_attn.qkv"]
"""In the order of a backward pass."""


@pytest.fixture
def layer():
    torch.manual_seed(1)
    quant = QuantConfig(backward="float")
    return TransformerEncoderLayer(
        LayerConfig(hidden=32, heads=2, feed_forward=64, dropout=0.0, quant=quant)
    )


def gradients(layer, on) -> dict[str, torch.Tensor]:
    """Of the weights, after a pass on a backend."""
    layer.backend = on
    layer.zero_grad()
    x = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(2))
    layer(x).square().sum().backward()
    return {place: layer.get_parameter(place + "_weight").grad for place in PRODUCTS}


def test_gradients_are_shown_as_they_are_used(layer):
    exact, shown = gradients(layer, backend("cpu")), []

    def show(operation, place):
        inside = operation.weight.values.abs() <= operation.weight.clip[:, None]
        shown.append(inside * (operation.floats.t() @ operation.x.coded.decode()))

    again = gradients(layer, Showing(show))
    for place, one in zip(PRODUCTS, shown, strict=True):
        assert torch.equal(again[place], exact[place])
        torch.testing.assert_close(one, exact[place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "least"), [("row", 25), ("row, predicted", 22), ("32x32", 25), ("tensor", 20)]
)
def test_rounded_gradients_are_near(layer, name, least):
    exact = gradients(layer, backend("cpu"))
    rounded = gradients(layer, Rounding(SCHEMES[name](), 1))
    for place in PRODUCTS:
        assert least < decibels(exact[place], rounded[place]) < 60


def test_the_study_measures_every_product_by_every_scheme(layer):
    study = Study([2], 1)
    study._names = {tensor.data_ptr(): name for name, tensor in layer.named_parameters()}
    for study._update in (1, 2):
        shown = []

        def show(operation, place, shown=shown):
            shown.append(place.follows)
            study.show(operation, place)

        gradients(layer, Showing(show))
    # what the product of fc2 made goes to fc1, the rest passes others
    assert shown == [
        False,
        True,
        False,
        False,
    ]
    schemes = len(SCHEMES) + len(KEPT)
    assert len(study.rows) == len(PRODUCTS) * schemes
    assert [row["weight"] for row in study.rows[::schemes]] == [
        place + "_weight" for place in PRODUCTS
    ]
    table = {row["scheme"]: row for row in summary(study.rows)}
    levels = {name: float(row["dw at 2"].split()[0]) for name, row in table.items()}
    assert levels["tensor"] < levels["32x32"] < levels["row, x not rounded again"]
    assert levels["row"] < levels["row, x not rounded again"]


def test_decibels():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert decibels(exact, exact) == math.inf
    assert decibels(exact, exact * 1.1) == pytest.approx(20)
