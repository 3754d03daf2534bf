"""Layers of GPT-2."""

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.models.fused_layer import FusedLayer, SideInputs
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

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        return self.float_class.forward(self, x, attention_mask=mask)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache=None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = False,
        **options,
    ) -> torch.Tensor:
        packing = self.packing(hidden_states, attention_mask, options, cache)
        if packing is not None and encoder_hidden_states is None:
            return self.fused(hidden_states, packing, cache=cache)
        return self.own_pass(
            hidden_states,
            cache,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            use_cache=use_cache,
            **options,
        )
