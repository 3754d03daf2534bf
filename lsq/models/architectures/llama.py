"""Layers of Llama and of those that share it: Mistral, Qwen2, Qwen3."""

from collections.abc import Mapping

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig, Rotary
from lsq.models.fused_layer import FusedLayer, SideInputs
from lsq.models.reading import activation_of, biases, plain_linears, reads, sources, the_same


class LlamaLayer(FusedLayer):
    """RMSNorm, causal self-attention with rotary embeddings, RMSNorm, a feed-forward block with a
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
    SOURCES = sources(
        {
            "self_attn_layer_norm": "input_layernorm",
            "self_attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
            "self_attn.query_norm": "self_attn.q_norm",
            "self_attn.key_norm": "self_attn.k_norm",
            "self_attn.out": "self_attn.o_proj",
            "final_layer_norm": "post_attention_layernorm",
            "feed_forward.gate": "mlp.gate_proj",
            "feed_forward.up": "mlp.up_proj",
            "feed_forward.fc2": "mlp.down_proj",
        },
        norm_bias=False,
    )

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

    def side_inputs(self, options: Mapping[str, object]) -> dict[str, object]:
        return {"rotation": options["position_embeddings"]}


def _window(attention: nn.Module) -> int | None:
    """The window that its code reads: Qwen2 and Qwen3 have one in some layers, Mistral in its
    configuration."""
    if "sliding_window" in vars(attention):
        return attention.sliding_window
    if reads(type(attention).forward, "sliding_window"):
        return getattr(attention.config, "sliding_window", None)
    return None
