"""The reference layers themselves: plain Transformer layers in float mode, integer arithmetic in
disguise in int8."""

import pytest
import torch
from torch import nn

from lsq.config import QuantConfig
from lsq.quant import calibrate, quantize
from tests.layers.reference import ReferenceLayer, vocabulary_loss
from tests.layers.shapes import HEADS, HIDDEN, INNER, config_of, padding_mask

TIME, SOURCE, BATCH = 7, 9, 3
TORCH_NAMES = {
    "self_attn.in_proj_": "self_attn.qkv_",
    "self_attn.out_proj.": "self_attn.out_",
    "multihead_attn.out_proj.": "encoder_attn.out_",
    "linear1.": "feed_forward.fc1_",
    "linear2.": "feed_forward.fc2_",
}


def torch_layer(kind, pre_norm, activation):
    """torch.nn's layer in float64 and its parameters under our names."""
    layer = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}[kind](
        HIDDEN, HEADS, INNER, 0.0, activation, norm_first=pre_norm, dtype=torch.float64
    )
    norms = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    }[kind]
    names = TORCH_NAMES | {f"norm{i}.": f"{norm}." for i, norm in enumerate(norms, 1)}
    parameters = {}
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if name.startswith("multihead_attn.in_proj_"):
            part = name.removeprefix("multihead_attn.in_proj_")
            parameters[f"encoder_attn.query_{part}"] = parameter[:HIDDEN]
            parameters[f"encoder_attn.key_value_{part}"] = parameter[HIDDEN:]
        else:
            prefix = next(prefix for prefix in names if name.startswith(prefix))
            parameters[names[prefix] + name.removeprefix(prefix)] = parameter
    return layer, parameters


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoder_layer_is_torchs(pre_norm, activation):
    theirs, parameters = torch_layer("encoder", pre_norm, activation)
    ours = ReferenceLayer(
        config_of(mode="float", pre_norm=pre_norm, activation=activation), parameters
    )
    x = torch.randn(TIME, BATCH, HIDDEN, dtype=torch.float64)
    mask = padding_mask(BATCH, TIME)
    torch.testing.assert_close(ours.encoder_layer(x, mask), theirs(x, src_key_padding_mask=mask))


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_decoder_layer_is_torchs(pre_norm):
    theirs, parameters = torch_layer("decoder", pre_norm, "relu")
    ours = ReferenceLayer(config_of(mode="float", pre_norm=pre_norm), parameters)
    x = torch.randn(TIME, BATCH, HIDDEN, dtype=torch.float64)
    memory = torch.randn(SOURCE, BATCH, HIDDEN, dtype=torch.float64)
    mask = padding_mask(BATCH, SOURCE)
    future = nn.Transformer.generate_square_subsequent_mask(TIME, dtype=torch.float64)
    expected = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=mask)
    torch.testing.assert_close(ours.decoder_layer(x, memory, mask), expected)


@pytest.mark.parametrize("bits", [8, 3])
def test_a_linear_is_a_product_of_integers(bits):
    config = config_of(bits=bits)
    x, weight = torch.randn(TIME, 16, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    parameters = {
        "x_clip": calibrate(x, "mse", bits).double(),
        "y_weight": weight,
        "y_weight_clip": calibrate(weight, "mse", bits, per_channel=True).double(),
        "y_bias": torch.randn(5, dtype=torch.float64),
    }
    layer = ReferenceLayer(config, parameters)
    x_codes, x_scale, _ = quantize(x, parameters["x_clip"], bits)
    codes, scale, _ = quantize(weight, parameters["y_weight_clip"], bits)
    product = (x_codes.long() @ codes.long().t()) * x_scale * scale
    found = layer.linear(layer.round(x, "x_clip"), "y")
    torch.testing.assert_close(found, product + parameters["y_bias"])


def test_dropouts_come_in_the_order_of_the_forward_pass():
    _, parameters = torch_layer("decoder", False, "relu")
    config = config_of(mode="float")
    seen = []

    def dropout(x, probability):
        seen.append(tuple(x.shape))
        return x

    layer = ReferenceLayer(config, parameters, dropout)
    layer.decoder_layer(
        torch.randn(TIME, BATCH, HIDDEN, dtype=torch.float64),
        torch.randn(SOURCE, BATCH, HIDDEN, dtype=torch.float64),
    )
    rows = (BATCH, TIME, HIDDEN)
    own, cross = (BATCH, HEADS, TIME, TIME), (BATCH, HEADS, TIME, SOURCE)
    assert seen == [own, rows, cross, rows, (BATCH, TIME, INNER), rows]


def test_the_loss_is_torchs():
    """torch spreads the smoothing over all words, fairseq over all but the target."""
    x, weight = torch.randn(21, 16, dtype=torch.float64), torch.randn(33, 16, dtype=torch.float64)
    target = torch.randint(0, 33, (21,))
    loss, nll = vocabulary_loss(QuantConfig(mode="float"), {"weight": weight}, x, target, 1, 0.1)
    logits = x @ weight.t()
    cross_entropy = nn.functional.cross_entropy
    torch.testing.assert_close(nll, cross_entropy(logits, target, ignore_index=1, reduction="sum"))
    expected = cross_entropy(
        logits, target, ignore_index=1, reduction="sum", label_smoothing=0.1 * 33 / 32
    )
    torch.testing.assert_close(loss, expected)
