"""Layers of ViT and of those that share it, such as DeiT."""

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer
from lsq.models.reading import activation_of, biases, layer_norm_epsilon, plain_linears


class ViTLayer(FusedLayer):
    """LayerNorm, self-attention, LayerNorm, a feed-forward block."""

    causal = False
    PARTS = {"attention": "Attention", "mlp": "MLP"}
    SOURCES = {
        "self_attn_layer_norm.weight": ("layernorm_before.weight",),
        "self_attn_layer_norm.bias": ("layernorm_before.bias",),
        "self_attn.qkv_weight": (
            "attention.q_proj.weight",
            "attention.k_proj.weight",
            "attention.v_proj.weight",
        ),
        "self_attn.qkv_bias": (
            "attention.q_proj.bias",
            "attention.k_proj.bias",
            "attention.v_proj.bias",
        ),
        "self_attn.out_weight": ("attention.o_proj.weight",),
        "self_attn.out_bias": ("attention.o_proj.bias",),
        "final_layer_norm.weight": ("layernorm_after.weight",),
        "final_layer_norm.bias": ("layernorm_after.bias",),
        "feed_forward.fc1_weight": ("mlp.fc1.weight",),
        "feed_forward.fc1_bias": ("mlp.fc1.bias",),
        "feed_forward.fc2_weight": ("mlp.fc2.weight",),
        "feed_forward.fc2_bias": ("mlp.fc2.bias",),
    }

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

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **options
    ) -> torch.Tensor:
        packing = self.packing(hidden_states, attention_mask, options)
        if packing is not None:
            return self.fused(hidden_states, packing)
        return self.own_pass(hidden_states, attention_mask, **options)
