"""Layers of torch.nn.TransformerEncoder as fused ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

import lsq
from lsq.layers.in_place import InPlace
from tests.models.zoo import FLOAT

HIDDEN, HEADS, TIME, SENTENCES = 48, 3, 11, 5


def encoder(layers: int = 2, *, heads: int = HEADS, **options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    options = {"dim_feedforward": 80, "dropout": 0.0, "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(HIDDEN, heads, **options)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=heads % 2 == 0)
    for parameter in model.parameters():  # all layers are copies of one; norms begin at ones
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def fused(model: nn.Module, quant: lsq.QuantConfig = FLOAT) -> nn.Module:
    mine = copy.deepcopy(model)
    report = lsq.convert(mine, quant)
    assert len(report.fused) == sum(isinstance(one, InPlace) for one in mine.modules()) > 0
    assert not quant.quantized or str(report).startswith(f"{4 * len(report.fused)} of ")
    return mine


def sentences(*, batch_first: bool = True) -> torch.Tensor:
    drawn = torch.randn(SENTENCES, TIME, HIDDEN, generator=torch.Generator().manual_seed(1))
    return drawn if batch_first else drawn.transpose(0, 1).contiguous()


LENGTHS = torch.tensor([11, 7, 1, 11, 4])
PADDING = torch.arange(TIME) >= LENGTHS[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TIME)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},
    "padding on the left": {"src_key_padding_mask": PADDING.flip(1)},
    "padding as floats": {
        "src_key_padding_mask": torch.zeros(PADDING.shape).masked_fill(PADDING, float("-inf"))
    },
    "causal": {"mask": CAUSAL},
    "causal as bool": {"mask": CAUSAL != 0},
    "causal by a hint": {"mask": CAUSAL, "is_causal": True},
    "causal and padding": {"mask": CAUSAL != 0, "src_key_padding_mask": PADDING},
    "nothing is hidden": {"mask": torch.zeros(TIME, TIME)},
    "a window": {"mask": (torch.arange(TIME)[:, None] - torch.arange(TIME)).abs() > 3},
    "biases": {"mask": torch.randn(TIME, TIME, generator=torch.Generator().manual_seed(2))},
    "each head": {
        "mask": CAUSAL.expand(SENTENCES * HEADS, -1, -1) * torch.ones(SENTENCES * HEADS, 1, 1)
    },
}


def present(masks: dict) -> torch.Tensor:
    padding = masks.get("src_key_padding_mask")
    return torch.ones(PADDING.shape).bool() if padding is None else padding == 0


def gradients(model: nn.Module, x: torch.Tensor, kept: torch.Tensor, masks: dict) -> dict:
    """Gradients of what tokens that are there give, by name, that of x among them."""
    x = x.clone().requires_grad_()
    y = model(x, **masks)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    (y * weight)[kept].sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"x": x.grad[kept], "y": y.detach()[kept], **found}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post-norm", "pre-norm"]
)
def test_the_same_as_pytorch_in_float(name, options):
    model, masks = encoder(**options), MASKS[name]
    mine, x, kept = fused(model), sentences(), present(masks)
    expected, found = (gradients(one, x, kept, masks) for one in (model, mine))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        expected, found = (one.eval()(x, **masks) for one in (model, mine))
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-4)


def runs_own_code(model: nn.Module, monkeypatch) -> list[int]:
    """A list that grows with every pass of a layer's own code."""
    seen, kind = [], type(model.layers[0])
    own = kind.own_pass
    monkeypatch.setattr(kind, "own_pass", lambda *given: (seen.append(1), own(*given))[1])
    return seen


def test_which_masks_the_program_takes(monkeypatch):
    mine = fused(encoder())
    seen = runs_own_code(mine, monkeypatch)
    own = {}
    for name, masks in MASKS.items():
        seen.clear()
        mine(sentences(), **masks)
        own[name] = len(seen)
    expected = dict.fromkeys(("a window", "biases", "each head"), len(mine.layers))
    assert own == {**dict.fromkeys(MASKS, 0), **expected}


def test_time_major_and_single_sentences():
    model = encoder(batch_first=False)
    mine, x = fused(model), sentences(batch_first=False)
    for given, padding in ((x, PADDING), (x[:, 1], PADDING[1])):
        found, expected = (
            one(given, src_key_padding_mask=padding)[~padding.t()] for one in (mine, model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_nested_tensors_in_evaluation():
    """TransformerEncoder leaves padding on the right out by itself."""
    model, given = encoder(heads=4), []
    mine = fused(model)
    mine.layers[1].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].is_nested))
    with torch.no_grad():
        found, expected = (
            one.eval()(sentences(), src_key_padding_mask=PADDING) for one in (mine, model)
        )
    assert given == [True]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dropout_and_norms_are_read_from_the_layer():
    mine = fused(encoder(dropout=0.25))
    x, layer = sentences(), mine.layers[1]
    assert not torch.equal(mine(x), mine(x))
    read = layer.config
    assert (read.dropout, read.attention_dropout, read.activation_dropout) == (0.25, 0.25, 0.25)
    for one in mine.layers:
        one.self_attn.dropout = one.dropout.p = one.dropout1.p = one.dropout2.p = 0.0
    assert torch.equal(mine(x), mine(x))
    layer.norm_first = True
    mine(x)
    assert layer.config.pre_norm


def own_block(layer):
    ours = layer._ff_block
    layer._ff_block = lambda x: 2 * ours(x)


def heads(layer):
    layer.self_attn.num_heads, layer.self_attn.head_dim = 6, 8


def in_eval_mode(layer):
    for one in (layer.dropout, layer.dropout1, layer.dropout2, layer.self_attn):
        one.eval()


def nothing_left(layer):
    layer.dropout1.p = layer.dropout2.p = 1.0


@pytest.mark.parametrize(
    "change, own",
    [
        (lambda layer: setattr(layer, "activation", nn.functional.gelu), False),
        (lambda layer: setattr(layer, "activation", torch.tanh), True),
        (heads, False),
        (own_block, True),
        (in_eval_mode, True),
        (nothing_left, True),
    ],
)
def test_what_changes_after_the_conversion_is_seen(change, own, monkeypatch):
    model = encoder(layers=1, dropout=0.3)
    mine = fused(model)
    for one in (model, mine):
        change(one.layers[0])
    if not own:
        model.eval(), mine.eval()
    seen = runs_own_code(mine, monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(4)
        found = mine(sentences())
    torch.manual_seed(4)
    torch.testing.assert_close(found, model(sentences()), rtol=1e-4, atol=1e-4)
    assert len(seen) == own and any("runs its own code" in str(one.message) for one in said) is own


def test_hooks_of_all_modules_are_called():
    mine, called = fused(encoder(layers=1)), []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(type(module))
    )
    try:
        with pytest.warns(UserWarning, match="a hook of all modules"):
            mine(sentences())
    finally:
        hook.remove()
    assert nn.Dropout in called


def test_a_hint_without_a_mask_and_masks_of_other_shapes_are_refused_as_by_pytorch():
    layer = fused(encoder(layers=1)).layers[0]
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        layer(sentences(), is_causal=True)
    for masks in (
        {"src_mask": torch.zeros(TIME - 1, TIME - 1)},
        {"src_mask": torch.zeros(1, TIME)},
        {"src_key_padding_mask": PADDING[:1]},
        {"src_key_padding_mask": PADDING[0]},
    ):
        with pytest.raises((RuntimeError, AssertionError), match="mask"):
            layer(sentences(), **masks)


def test_a_hint_is_not_believed_where_padding_is():
    model = encoder(layers=1)
    mine, masks = fused(model), {**MASKS["padding"], "src_mask": MASKS["a window"]["mask"]}
    found, expected = (
        one.layers[0](sentences(), is_causal=True, **masks)[~PADDING] for one in (mine, model)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
def test_training_after_a_pass_of_inference(train):
    mine = fused(encoder(layers=1), lsq.QuantConfig())
    with torch.inference_mode():
        mine.train(train)(sentences())
    mine.train()(sentences()).sum().backward()
    assert mine.layers[0].linear2.weight.grad.isfinite().all()


def test_trains_in_int8_and_comes_back():
    model = encoder()
    before = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    mine, target = fused(model, lsq.QuantConfig()), sentences().roll(1, 1)
    optimizer, losses = torch.optim.Adam(mine.parameters(), lr=3e-3), []
    for _ in range(30):
        loss = (
            mine(sentences(), src_key_padding_mask=PADDING)[~PADDING] - target[~PADDING]
        ).square()
        losses.append(loss.mean().item())
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    again = encoder()
    again.load_state_dict(lsq.models.float_state_dict(mine))
    with torch.no_grad():
        found = mine.eval()(sentences())
        expected = lsq.revert(mine)(sentences())
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert {name: tuple(value.shape) for name, value in mine.state_dict().items()} == before
    assert torch.equal(again.eval()(sentences()), expected)
    assert not any(isinstance(one, InPlace) for one in mine.modules())


class Changed(nn.TransformerEncoderLayer):
    """A class of somebody else's."""


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda layer: setattr(layer.self_attn, "add_zero_attn", True), "add_zero_attn"),
        (lambda layer: setattr(layer, "activation", torch.tanh), "activation is builtin_function"),
        (lambda layer: setattr(layer.dropout1, "p", 0.5), "different dropouts of residuals"),
        (lambda layer: layer.linear1.register_forward_hook(lambda *_: None), "a hook"),
    ],
)
def test_why_a_layer_is_not_fused(change, reason):
    model = encoder(layers=1)
    change(model.layers[0])
    report = lsq.convert(model, minimum_width=16)
    (whole,) = report.whole
    assert reason in whole.reason, whole.reason
    assert report.left.keys() == {
        "layers.0.self_attn.in_proj_weight",
        "layers.0.self_attn.out_proj",
    }


def test_layers_of_other_classes_and_of_64_bits_are_left():
    report = lsq.convert(Changed(HIDDEN, HEADS, 80), minimum_width=16)
    assert not report.whole and len(report.converted) == 2
    (whole,) = lsq.convert(encoder(layers=1).double(), FLOAT).whole
    assert whole.reason == "it has parameters of torch.float64"


def test_weights_of_attention_are_counted():
    """Those in a MultiheadAttention by itself stay floats; the report counts them."""
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(64, 4),
            "other": nn.MultiheadAttention(64, 4, kdim=32, vdim=96),
            "linear": nn.Linear(64, 128),
        }
    )
    report = lsq.convert(model)
    assert report.converted == ("linear",)
    names = (
        ("in_proj_weight", "out_proj"),
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj"),
    )
    kinds = zip(("attention", "other"), names, strict=True)
    assert set(report.left) == {f"{kind}.{one}" for kind, names in kinds for one in names}
    assert all("MultiheadAttention" in reason for reason in report.left.values())
    total = 4 * 64 * 64 + (2 * 64 + 32 + 96) * 64 + 64 * 128
    assert f"{64 * 128:,} of their {total:,} weights" in str(report)
