"""fairseq's own layers with the weights of ours, and what they compute under our names."""

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)

from tests.layers.oracle import Outcome, assert_accurate, collect
from tests.layers.shapes import HEADS, HIDDEN, INNER


def fairseq_layer(kind: str, *, pre_norm: bool, activation: str):
    """An "encoder" or "decoder" layer without dropout."""
    config = TransformerConfig()
    config.dropout = config.attention_dropout = config.activation_dropout = 0.0
    config.activation_fn = activation
    for side in (config.encoder, config.decoder):
        side.embed_dim, side.attention_heads, side.ffn_embed_dim = HIDDEN, HEADS, INNER
        side.normalize_before = pre_norm
    return (TransformerEncoderLayerBase if kind == "encoder" else TransformerDecoderLayerBase)(
        config
    )


def under_our_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters (or gradients) of a fairseq layer, renamed and put together as in lsq.layers."""
    parts = {
        "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out": ("self_attn.out_proj",),
        "encoder_attn.query": ("encoder_attn.q_proj",),
        "encoder_attn.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
        "encoder_attn.out": ("encoder_attn.out_proj",),
        "feed_forward.fc1": ("fc1",),
        "feed_forward.fc2": ("fc2",),
    }
    found = {name: tensor for name, tensor in tensors.items() if "layer_norm" in name}
    for ours, theirs in parts.items():
        for kind in ("weight", "bias"):
            if f"{theirs[0]}.{kind}" in tensors:
                found[f"{ours}_{kind}"] = torch.cat([tensors[f"{name}.{kind}"] for name in theirs])
    return found


def compare_with_fairseq(module, theirs, run, run_theirs, draw) -> None:
    """Outputs and all gradients of `module` (mode="float") against fairseq's layer in float64."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    module.load_state_dict(under_our_names(dict(theirs.named_parameters())))
    inputs = draw()
    outcomes = []
    for dtype in (torch.float64, torch.float32):
        theirs.to(dtype)
        values = collect(run_theirs, theirs, inputs, dict(theirs.named_parameters()), dtype)
        prefix = "gradient of "
        renamed = under_our_names(
            {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
        )
        kept = {
            name: value for name, value in values.items() if name == "output" or "input" in name
        }
        outcomes.append(Outcome(kept | {prefix + name: value for name, value in renamed.items()}))
    exact, single = outcomes
    values = collect(run, module, inputs, dict(module.named_parameters()), torch.float32)
    assert_accurate(values, exact.values, single.values)
