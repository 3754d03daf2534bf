"""Layers of Marian and BART, with norms behind their blocks, and of those with norms before them:
mBART, M2M100 (NLLB), Pegasus. Names inside the layers are the same in all of them.
"""

from typing import ClassVar

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer, SideInputs
from lsq.models.reading import (
    activation_of,
    biases,
    layer_norm_epsilon,
    plain_linears,
    sources,
    the_same,
)

ENCODER = {
    "self_attn_layer_norm": "self_attn_layer_norm",
    "self_attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "self_attn.out": "self_attn.out_proj",
    "final_layer_norm": "final_layer_norm",
    "feed_forward.fc1": "fc1",
    "feed_forward.fc2": "fc2",
}
DECODER = ENCODER | {
    "encoder_attn_layer_norm": "encoder_attn_layer_norm",
    "encoder_attn.query": "encoder_attn.q_proj",
    "encoder_attn.key_value": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "encoder_attn.out": "encoder_attn.out_proj",
}


class EncoderLayer(FusedLayer):
    """Self-attention and a feed-forward block, a LayerNorm behind each."""

    SOURCES, PARTS, causal = sources(ENCODER), {"self_attn": "Attention"}, False
    PRE_NORM: ClassVar[bool] = False

    @classmethod
    def config_of(cls, layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attentions = cls.attentions(layer)
        inner, outer = plain_linears(layer, "fc1", "fc2")
        linears = [inner, outer]
        for attention in attentions:
            linears += plain_linears(attention, "q_proj", "k_proj", "v_proj", "out_proj")
        return LayerConfig(
            hidden=attentions[0].embed_dim,
            heads=the_same("heads", [one.num_heads for one in attentions]),
            feed_forward=inner.out_features,
            activation=activation_of(layer.activation_fn),
            bias=biases(*linears),
            pre_norm=cls.PRE_NORM,
            quant=quantization,
            **cls.settings(layer),
        )

    @classmethod
    def settings(cls, layer: nn.Module) -> dict[str, object]:
        attentions = cls.attentions(layer)
        norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
        norms += [layer.encoder_attn_layer_norm] if cls.CROSS else []
        return {
            "dropout": layer.dropout,
            "activation_dropout": layer.activation_dropout,
            "attention_dropout": the_same(
                "dropouts of attention", [one.dropout for one in attentions]
            ),
            "softmax_scale": the_same("factors of scores", [one.scaling for one in attentions]),
            "layer_norm_epsilon": layer_norm_epsilon(*norms),
        }

    @classmethod
    def attentions(cls, layer: nn.Module) -> list[nn.Module]:
        return [layer.self_attn, *([layer.encoder_attn] if cls.CROSS else [])]


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to an encoder's output and a feed-forward block, a LayerNorm
    behind each."""

    SOURCES = sources(DECODER)
    PARTS = {"self_attn": "Attention", "encoder_attn": "Attention"}
    causal, CROSS = True, True

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        return self.float_class.forward(self, x, mask, side.states)


class PreNormEncoderLayer(EncoderLayer):
    """The same with LayerNorms before its blocks."""

    PRE_NORM = True


class PreNormDecoderLayer(DecoderLayer):
    """The same with LayerNorms before its blocks."""

    PRE_NORM = True
