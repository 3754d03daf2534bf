"""Layers of BERT and of those that share it, such as RoBERTa."""

from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer
from lsq.models.reading import (
    activation_of,
    biases,
    dropout_of,
    layer_norm_epsilon,
    plain_linears,
    sources,
)

HEADS = ("query", "key", "value")


class BertLayer(FusedLayer):
    """Self-attention, LayerNorm, a feed-forward block, LayerNorm."""

    causal = False
    PARTS = {
        "attention": "Attention",
        "attention.self": "SelfAttention",
        "attention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    }
    SOURCES = sources(
        {
            "self_attn.qkv": [f"attention.self.{part}" for part in HEADS],
            "self_attn.out": "attention.output.dense",
            "self_attn_layer_norm": "attention.output.LayerNorm",
            "feed_forward.fc1": "intermediate.dense",
            "feed_forward.fc2": "output.dense",
            "final_layer_norm": "output.LayerNorm",
        }
    )

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attention, after = layer.attention.self, layer.attention.output
        q, k, v = plain_linears(attention, *HEADS)
        (out,) = plain_linears(after, "dense")
        (first,) = plain_linears(layer.intermediate, "dense")
        (second,) = plain_linears(layer.output, "dense")
        return LayerConfig(
            hidden=q.in_features,
            heads=attention.num_attention_heads,
            head_width=attention.attention_head_size,
            feed_forward=first.out_features,
            activation=activation_of(layer.intermediate.intermediate_act_fn),
            bias=biases(out, first, second),
            head_bias=biases(q, k, v),
            quant=quantization,
            **BertLayer.settings(layer),
        )

    @staticmethod
    def settings(layer: nn.Module) -> dict[str, object]:
        attention, after = layer.attention.self, layer.attention.output
        return {
            "softmax_scale": attention.scaling,
            "attention_dropout": attention.dropout.p,
            "dropout": dropout_of(after.dropout, layer.output.dropout),
            "layer_norm_epsilon": layer_norm_epsilon(after.LayerNorm, layer.output.LayerNorm),
        }

    @staticmethod
    def attentions(layer: nn.Module) -> list[nn.Module]:
        return [layer.attention.self]
