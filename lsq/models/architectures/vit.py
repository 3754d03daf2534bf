"""Layers of ViT and of those that share it, such as DeiT."""

from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer
from lsq.models.reading import activation_of, biases, layer_norm_epsilon, plain_linears, sources


class ViTLayer(FusedLayer):
    """LayerNorm, self-attention, LayerNorm, a feed-forward block."""

    causal = False
    PARTS = {"attention": "Attention", "mlp": "MLP"}
    SOURCES = sources(
        {
            "self_attn_layer_norm": "layernorm_before",
            "self_attn.qkv": [f"attention.{part}_proj" for part in "qkv"],
            "self_attn.out": "attention.o_proj",
            "final_layer_norm": "layernorm_after",
            "feed_forward.fc1": "mlp.fc1",
            "feed_forward.fc2": "mlp.fc2",
        }
    )

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attention, mlp = layer.attention, layer.mlp
        q, k, v, out = plain_linears(attention, "q_proj", "k_proj", "v_proj", "o_proj")
        first, second = plain_linears(mlp, "fc1", "fc2")
        return LayerConfig(
            hidden=q.in_features,
            heads=attention.num_attention_heads,
            head_width=attention.head_dim,
            feed_forward=first.out_features,
            activation=activation_of(mlp.activation_fn),
            bias=biases(out, first, second),
            head_bias=biases(q, k, v),
            pre_norm=True,
            quant=quantization,
            **ViTLayer.settings(layer),
        )

    @staticmethod
    def settings(layer: nn.Module) -> dict[str, object]:
        return {
            "softmax_scale": layer.attention.scaling,
            "attention_dropout": layer.attention.attention_dropout,
            "dropout": layer.dropout.p,
            "layer_norm_epsilon": layer_norm_epsilon(layer.layernorm_before, layer.layernorm_after),
        }

    @staticmethod
    def attentions(layer: nn.Module) -> list[nn.Module]:
        return [layer.attention]
