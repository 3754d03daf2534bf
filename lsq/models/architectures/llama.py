"""Layers of Llama and of those that share it: Mistral, Qwen2, Qwen3."""

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig, Rotary
from lsq.models.fused_layer import FusedLayer, SideInputs, cache_of
from lsq.models.reading import activation_of, biases, plain_linears, reads, the_same


class LlamaLayer(FusedLayer):
    """RMSNorm, causal self-attention with heads that turn, RMSNorm, a feed-forward block with a
    gate."""

    causal = True
    PARTS = {
        "self_attn": "Attention",
        "self_attn.q_norm": "RMSNorm",
        "self_attn.k_norm": "RMSNorm",
        "mlp": "MLP",
        "input_layernorm": "RMSNorm",
        "post_attention_layernorm": "RMSNorm",
    }
    SOURCES = {
        "self_attn_layer_norm.weight": ("input_layernorm.weight",),
        "self_attn.qkv_weight": (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
        ),
        "self_attn.qkv_bias": (
            "self_attn.q_proj.bias",
            "self_attn.k_proj.bias",
            "self_attn.v_proj.bias",
        ),
        "self_attn.query_norm.weight": ("self_attn.q_norm.weight",),
        "self_attn.key_norm.weight": ("self_attn.k_norm.weight",),
        "self_attn.out_weight": ("self_attn.o_proj.weight",),
        "self_attn.out_bias": ("self_attn.o_proj.bias",),
        "final_layer_norm.weight": ("post_attention_layernorm.weight",),
        "feed_forward.gate_weight": ("mlp.gate_proj.weight",),
        "feed_forward.gate_bias": ("mlp.gate_proj.bias",),
        "feed_forward.up_weight": ("mlp.up_proj.weight",),
        "feed_forward.up_bias": ("mlp.up_proj.bias",),
        "feed_forward.fc2_weight": ("mlp.down_proj.weight",),
        "feed_forward.fc2_bias": ("mlp.down_proj.bias",),
    }

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v, out = plain_linears(attention, "q_proj", "k_proj", "v_proj", "o_proj")
        gate, up, down = plain_linears(mlp, "gate_proj", "up_proj", "down_proj")
        width = attention.head_dim
        return LayerConfig(
            hidden=q.in_features,
            heads=q.out_features // width,
            kv_heads=k.out_features // width,
            head_width=width,
            rotary=Rotary(places=1),
            feed_forward=gate.out_features,
            activation=activation_of(mlp.act_fn),
            gated=True,
            bias=biases(out, gate, up, down),
            head_bias=biases(q, k, v),
            pre_norm=True,
            norm="rms",
            quant=quantization,
            **LlamaLayer.settings(layer),
        )

    @staticmethod
    def settings(layer: nn.Module) -> dict[str, object]:
        attention, norms = layer.self_attn, [layer.input_layernorm, layer.post_attention_layernorm]
        if not getattr(attention.config, "is_causal", True):
            raise ValueError("its attention is not causal")
        heads = [attention.q_norm, attention.k_norm] if "q_norm" in attention._modules else []
        return {
            "softmax_scale": attention.scaling,
            "window": _window(attention),
            "attention_dropout": attention.attention_dropout,
            "layer_norm_epsilon": the_same(
                "epsilons of norms", [one.variance_epsilon for one in norms]
            ),
            "qk_norm": the_same(
                "epsilons of norms of heads", [one.variance_epsilon for one in heads]
            ),
        }

    @staticmethod
    def attentions(layer: nn.Module) -> list[nn.Module]:
        return [layer.self_attn]

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        return self.float_class.forward(
            self, x, attention_mask=mask, position_embeddings=side.rotation
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids=None,
        use_cache: bool | None = False,
        position_embeddings=None,
        **options,
    ) -> torch.Tensor:
        cache = cache_of(options)
        packing = self.packing(hidden_states, attention_mask, options, cache)
        if packing is not None:
            return self.fused(hidden_states, packing, rotation=position_embeddings, cache=cache)
        return self.own_pass(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **options,
        )


def _window(attention: nn.Module) -> int | None:
    """That which its code reads: Qwen2 and Qwen3 have one in some layers, Mistral in its
    configuration."""
    if "sliding_window" in vars(attention):
        return attention.sliding_window
    if reads(type(attention).forward, "sliding_window"):
        return getattr(attention.config, "sliding_window", None)
    return None
