import torch
from torch import nn

from lsq.study.inputs import products
from tests.study.models import Layers


def seen_in(model: nn.Module, weights: dict, *given) -> list[tuple[str, tuple[int, ...], bool]]:
    found = []

    def look(name, x, transposed):
        found.append((name, tuple(x.shape), transposed))
        return x

    with products(weights, look):
        model.eval()(*given)
    return found


def test_products_are_named_by_their_weights():
    model = Layers()
    weights = {name: one for name, one in model.named_parameters() if one.dim() > 1}
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    found = seen_in(model, weights, tokens)
    shapes = {(name, shape[-1], transposed) for name, shape, transposed in found}
    assert shapes == {
        ("attention.in_proj_weight", 24, False),
        ("attention.out_proj.weight", 24, False),
        ("across", 24, True),
        ("back.weight", 40, False),
        ("table.weight", 24, False),
    }
    assert seen_in(model, {"back": model.back.weight}, tokens) == [("back", (10, 40), False)]


@torch.no_grad()
def test_fused_layers_show_their_products():
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    weights = {name: one for name, one in layer.named_parameters() if one.dim() > 1}
    assert {name for name, _, _ in seen_in(layer, weights, torch.randn(2, 3, 16))} == set(weights)


@torch.no_grad()
def test_products_read_what_is_returned():
    torch.manual_seed(6)
    layer, x = nn.Linear(8, 3), torch.randn(4, 8)
    with products({"weight": layer.weight}, lambda name, x, transposed: 2 * x):
        found, others = layer(x), nn.functional.linear(x, layer.weight.clone(), layer.bias)
    assert torch.equal(found, layer(2 * x))
    assert torch.equal(others, layer(x))
