"""What is seen of a model's products, against the same by hand, and what is left as it was."""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import lsq
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer
from lsq.models.sparsity import sparsify
from lsq.study.products import gather, inputs_replaced
from lsq.study.tensors import KINDS
from tests.study.models import Layers

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")


def seen(
    model: nn.Module, run, patterns=(), largest: int = 2**18
) -> dict[tuple[str, str], torch.Tensor]:
    return {(one.kind, one.name): one.values for one in gather(model, run, patterns, largest)}


def same(found: dict, expected: dict, **tolerances) -> None:
    assert found.keys() == expected.keys()
    tolerances = tolerances or {"rtol": 1e-3, "atol": 1e-5}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), **tolerances)


def test_a_linear_layer_and_one_in_out():
    model = nn.Sequential(nn.Linear(5, 7), transformers.pytorch_utils.Conv1D(3, 7))
    x = torch.randn(2, 4, 5)
    found = seen(model, lambda: model(x).square().sum())
    inner = functional.linear(x, model[0].weight, model[0].bias)
    gradient = 2 * model(x).detach()
    wanted = {
        ("weight", "0.weight"): model[0].weight,
        ("weight", "1.weight"): model[1].weight.t(),
        ("activation", "0.weight"): x.view(8, 5),
        ("activation", "1.weight"): inner.view(8, 7),
        ("gradient", "1.weight"): gradient.view(8, 3),
        ("gradient", "0.weight"): (gradient @ model[1].weight.t()).view(8, 7),
    }
    same(found, wanted, rtol=1e-5, atol=1e-6)


def test_convolutions_have_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(2), nn.Conv1d(4, 5, 3))
    x = torch.randn(2, 3, 5, 5)
    found = seen(model, lambda: model(x).sum())
    assert torch.equal(found["activation", "0.weight"], x.movedim(1, -1).reshape(50, 3))
    assert torch.equal(found["weight", "0.weight"], model[0].weight.detach().view(4, 12))
    assert found["activation", "2.weight"].shape == (32, 4)
    assert torch.equal(found["gradient", "2.weight"], torch.ones(28, 5))


def test_attention_of_pytorch():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    found = seen(model, lambda: model(x, x, x)[0].sum())
    assert set(found) == set(itertools.product(KINDS, ("in_proj_weight", "out_proj.weight")))
    assert found["gradient", "in_proj_weight"].shape == (6, 24)
    found = seen(model, lambda: model(x, memory, memory)[0].sum())
    assert found["activation", "in_proj_weight"].shape == (6, 8)
    assert found["activation", "in_proj_weight[8:]"].shape == (10, 8)
    assert functional.linear is torch._C._nn.linear


def test_attention_of_fairseq():
    attention = pytest.importorskip("fairseq.modules").MultiheadAttention(8, 2, self_attention=True)
    x = torch.randn(3, 2, 8)
    found = seen(attention, lambda: attention(x, x, x)[0].sum())
    names = [f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    assert set(found) == set(itertools.product(KINDS, names))
    torch.testing.assert_close(found["activation", "v_proj.weight"], x.reshape(6, 8))


def test_without_a_loss_there_are_no_gradients():
    model = nn.Linear(4, 4)

    def run():
        model(torch.ones(1, 4))

    assert {kind for kind, _ in seen(model, run)} == {"weight", "activation"}
    assert {kind for kind, _ in seen(model, lambda: None)} == {"weight"}
    for returned, message in ((torch.ones(2), r"tensor of shape \[2\]"), ("x", "str")):
        with pytest.raises(ValueError, match=f"run returned a {message}; return a loss"):
            gather(model, lambda returned=returned: returned, (), 9)
    with pytest.raises(ValueError, match="LayerNorm has no float parameter with two"):
        gather(nn.LayerNorm(3), lambda: None, (), 9)


def test_the_first_pass_counts_and_patterns_choose():
    """Also of what is changed in place; a weight made of others goes by its shape."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    passes = [torch.ones(1, 4), torch.zeros(3, 4)]

    def run():
        return sum(model(x).mul_(3).sum() for x in passes)

    found = seen(model, run, ["0.*"])
    assert set(found) == {(kind, "0.weight") for kind in KINDS}
    assert torch.equal(found["activation", "0.weight"], passes[0])
    assert seen(model, run)["gradient", "1.weight"].unique().tolist() == [3.0]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    found = seen(normed, lambda: normed(torch.ones(2, 4)).sum())
    assert ("activation", "a weight made of others [3, 4]") in found


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_layers_of_lsq_are_those_of_floats(mode):
    sizes = {"hidden": 64, "heads": 4, "feed_forward": 96}
    config = LayerConfig(**sizes, quant=QuantConfig(mode=mode), dropout=0.1)
    torch.manual_seed(3)
    model = TransformerEncoderLayer(config)
    x = torch.randn(5, 3, 64)
    found = seen(model, lambda: model(x).square().mean())
    rows = x.transpose(0, 1).reshape(15, 64)
    torch.testing.assert_close(found["activation", "self_attn.qkv_weight"], rows)
    weights = {name for kind, name in found if kind == "weight"}
    assert set(found) == set(itertools.product(KINDS, weights)) and len(weights) == 4


def small_gpt2() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 70, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def test_a_converted_model_is_seen_as_the_float_one_was_and_stays_as_it_is():
    model = small_gpt2()
    ids = torch.randint(0, 70, (2, 9))

    def run():
        return model(ids, labels=ids).loss

    expected = seen(model, run)
    lsq.convert(model)
    model.train()
    run().backward()
    state, trained = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in trained.items() if p.requires_grad}
    same(seen(model, run), expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(gradient, trained[name].grad) for name, gradient in gradients.items())
    assert all(module.training for module in model.modules())


def test_weights_that_are_joined_are_seen_one_by_one():
    """The queries, keys and values of a converted BERT are one product."""
    torch.manual_seed(2)
    sizes = {"vocab_size": 70, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes)
    model = transformers.BertForMaskedLM(config)
    ids = torch.randint(0, 70, (2, 9))
    expected = seen(model, lambda: model(ids, labels=ids).loss)
    lsq.convert(model)
    same(seen(model, lambda: model(ids, labels=ids).loss), expected)


def test_sparse_weights_are_what_masks_leave():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lsq.convert(model)
    sparsify(model)
    x = torch.randn(5, 64)
    found = seen(model, lambda: model(x).square().mean())
    assert len(found) == 6
    for name, module in model.named_children():
        kept = found["weight", f"{name}.weight"].view(64, 16, 4) != 0
        assert (kept.sum(2) == 2).all() and "values_of" not in vars(module)


def test_everything_is_put_back_when_something_fails():
    model = nn.Sequential(
        QuantizedLinear(64, 64), nn.MultiheadAttention(64, 2), nn.Dropout()
    ).train()
    model[2].eval()

    def run():
        x = model[0](torch.ones(3, 64))
        model[1](x, x, x)
        raise KeyError("away")

    with pytest.raises(KeyError):
        gather(model, run, (), 99)
    assert model[0].backend is None and not model[0].schedule.float_fallback
    assert model.training and model[1].training and not model[2].training
    assert functional.linear is torch._C._nn.linear


def seen_in(model: nn.Module, weights: dict, *given) -> list[tuple[str, tuple[int, ...], bool]]:
    found = []

    def look(name, x, transposed):
        found.append((name, tuple(x.shape), transposed))
        return x

    with inputs_replaced(weights, look):
        model.eval()(*given)
    return found


@torch.no_grad()
def test_products_are_named_by_their_weights_and_read_what_is_returned():
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
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # which PyTorch fuses
    weights = {name: one for name, one in layer.named_parameters() if one.dim() > 1}
    assert {name for name, _, _ in seen_in(layer, weights, torch.randn(2, 3, 16))} == set(weights)
    layer, x = nn.Linear(8, 3), torch.randn(4, 8)
    with inputs_replaced({"weight": layer.weight}, lambda name, x, transposed: 2 * x):
        found, others = layer(x), functional.linear(x, layer.weight.clone(), layer.bias)
    assert torch.equal(found, layer(2 * x)) and torch.equal(others, layer(x))
