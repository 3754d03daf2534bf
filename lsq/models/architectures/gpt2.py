"""Layers of GPT-2."""

from collections.abc import Mapping

from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer
from lsq.models.reading import activation_of, dropout_of, layer_norm_epsilon, plain, sources


class GPT2Layer(FusedLayer):
    """LayerNorm, causal self-attention, LayerNorm, a feed-forward block; weights are [inputs,
    outputs]."""

    causal = True
    PARTS = {"attn": "Attention", "mlp": "MLP"}
    SOURCES = sources(
        {
            "self_attn_layer_norm": "ln_1",
            "self_attn.qkv": "attn.c_attn",
            "self_attn.out": "attn.c_proj",
            "final_layer_norm": "ln_2",
            "feed_forward.fc1": "mlp.c_fc",
            "feed_forward.fc2": "mlp.c_proj",
        }
    )

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        from transformers.pytorch_utils import Conv1D

        attention, mlp = layer.attn, layer.mlp
        plain(Conv1D, attention, "c_attn", "c_proj")
        inner, _ = plain(Conv1D, mlp, "c_fc", "c_proj")
        return LayerConfig(
            hidden=attention.embed_dim,
            heads=attention.num_heads,
            feed_forward=inner.nf,
            activation=activation_of(mlp.act),
            in_out=True,
            pre_norm=True,
            quant=quantization,
            **GPT2Layer.settings(layer),
        )

    @staticmethod
    def settings(layer: nn.Module) -> dict[str, object]:
        return {
            "softmax_scale": layer.attn.scaling,
            "attention_dropout": layer.attn.attn_dropout.p,
            "dropout": dropout_of(layer.attn.resid_dropout, layer.mlp.dropout),
            "layer_norm_epsilon": layer_norm_epsilon(layer.ln_1, layer.ln_2),
        }

    @staticmethod
    def attentions(layer: nn.Module) -> list[nn.Module]:
        return [layer.attn]

    def side_inputs(self, options: Mapping[str, object]) -> dict[str, object] | None:
        return {} if options.get("encoder_hidden_states") is None else None
