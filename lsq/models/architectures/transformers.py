"""Layers of transformers that need no forward of their own, only FusedLayer's."""

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import nn

from lsq.config import Rotary
from lsq.models.exact import base_of
from lsq.models.fused_layer import FusedLayer, SideInputs
from lsq.models.reading import at, reads, sources, the_same


class BertLayer(FusedLayer):
    """Self-attention, LayerNorm, a feed-forward block, LayerNorm."""

    PARTS = {
        "attention": "Attention",
        "attention.self": "SelfAttention",
        "attention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    }
    MODULES = {
        "self_attn.qkv": [f"attention.self.{part}" for part in ("query", "key", "value")],
        "self_attn.out": "attention.output.dense",
        "self_attn_layer_norm": "attention.output.LayerNorm",
        "feed_forward.fc1": "intermediate.dense",
        "feed_forward.fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
    }
    SOURCES = sources(MODULES)
    attends = attrgetter("attention.self")
    SHAPE = at(
        heads="attention.self.num_attention_heads",
        head_width="attention.self.attention_head_size",
        activation="intermediate.intermediate_act_fn",
    )
    SETTINGS = at(
        softmax_scale="attention.self.scaling",
        attention_dropout="attention.self.dropout.p",
        dropout=("attention.output.dropout.p", "output.dropout.p"),
        layer_norm_epsilon=("attention.output.LayerNorm.eps", "output.LayerNorm.eps"),
    )


class ViTLayer(FusedLayer):
    """LayerNorm, self-attention, LayerNorm, a feed-forward block."""

    PARTS = {"attention": "Attention", "mlp": "MLP"}
    MODULES = {
        "self_attn_layer_norm": "layernorm_before",
        "self_attn.qkv": [f"attention.{part}_proj" for part in "qkv"],
        "self_attn.out": "attention.o_proj",
        "final_layer_norm": "layernorm_after",
        "feed_forward.fc1": "mlp.fc1",
        "feed_forward.fc2": "mlp.fc2",
    }
    SOURCES = sources(MODULES)
    attends = attrgetter("attention")
    FIXED = {"pre_norm": True}
    SHAPE = at(
        heads="attention.num_attention_heads",
        head_width="attention.head_dim",
        activation="mlp.activation_fn",
    )
    SETTINGS = at(
        softmax_scale="attention.scaling",
        attention_dropout="attention.attention_dropout",
        dropout="dropout.p",
        layer_norm_epsilon=("layernorm_before.eps", "layernorm_after.eps"),
    )


class GPT2Layer(FusedLayer):
    """LayerNorm, causal self-attention, LayerNorm, feed-forward; weights [inputs, outputs]."""

    causal = True
    PARTS = {"attn": "Attention", "mlp": "MLP"}
    MODULES = {
        "self_attn_layer_norm": "ln_1",
        "self_attn.qkv": "attn.c_attn",
        "self_attn.out": "attn.c_proj",
        "final_layer_norm": "ln_2",
        "feed_forward.fc1": "mlp.c_fc",
        "feed_forward.fc2": "mlp.c_proj",
    }
    SOURCES = sources(MODULES)
    attends = attrgetter("attn")
    FIXED = {"pre_norm": True}
    SHAPE = at(heads="attn.num_heads", activation="mlp.act")
    SETTINGS = at(
        softmax_scale="attn.scaling",
        attention_dropout="attn.attn_dropout.p",
        dropout=("attn.resid_dropout.p", "mlp.dropout.p"),
        layer_norm_epsilon=("ln_1.eps", "ln_2.eps"),
    )

    def side_inputs(self, options: Mapping[str, object]) -> dict[str, object] | None:
        return {} if options.get("encoder_hidden_states") is None else None


class LlamaLayer(FusedLayer):
    """RMSNorm, causal rotary self-attention, RMSNorm, gated feed-forward: Llama, Mistral, Qwen."""

    causal = True
    PARTS = {
        "self_attn": "Attention",
        "self_attn.q_norm": "RMSNorm",
        "self_attn.k_norm": "RMSNorm",
        "mlp": "MLP",
        "input_layernorm": "RMSNorm",
        "post_attention_layernorm": "RMSNorm",
    }
    MODULES = {
        "self_attn_layer_norm": "input_layernorm",
        "self_attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "self_attn.query_norm": "self_attn.q_norm",
        "self_attn.key_norm": "self_attn.k_norm",
        "self_attn.out": "self_attn.o_proj",
        "final_layer_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.fc2": "mlp.down_proj",
    }
    SOURCES = sources(MODULES, norm_bias=False)
    attends = attrgetter("self_attn")
    FIXED = {"pre_norm": True, "norm": "rms", "rotary": Rotary(positions=1)}
    SHAPE = at(head_width="self_attn.head_dim", activation="mlp.act_fn")
    SETTINGS = at(
        softmax_scale="self_attn.scaling",
        attention_dropout="self_attn.attention_dropout",
        layer_norm_epsilon=(
            "input_layernorm.variance_epsilon",
            "post_attention_layernorm.variance_epsilon",
        ),
    )

    @classmethod
    def shape(cls, layer: nn.Module) -> dict[str, object]:
        attention = layer.self_attn
        heads, kv_heads = (
            base_of(one).out_features // attention.head_dim
            for one in (attention.q_proj, attention.k_proj)
        )
        return {**super().shape(layer), "heads": heads, "kv_heads": kv_heads}

    @classmethod
    def settings(cls, layer: nn.Module) -> dict[str, object]:
        attention = layer.self_attn
        if not getattr(attention.config, "is_causal", True):
            raise ValueError("its attention is not causal")
        norms = [attention.q_norm, attention.k_norm] if "q_norm" in attention._modules else []
        return {
            **super().settings(layer),
            "window": _window(attention),
            "qk_norm": the_same("qk_norm", [one.variance_epsilon for one in norms]),
        }

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        return self.float_class.forward(
            self, x, attention_mask=mask, position_embeddings=side.rotation
        )

    def side_inputs(self, options: Mapping[str, object]) -> dict[str, object]:
        return {"rotation": options["position_embeddings"]}


def _window(attention: nn.Module) -> int | None:
    """Return the window that the layer's code uses: an attribute, in Mistral from its config."""
    if "sliding_window" in vars(attention):
        return attention.sliding_window
    if reads(type(attention).forward, "sliding_window"):
        return getattr(attention.config, "sliding_window", None)
    return None


class MarianEncoderLayer(FusedLayer):
    """Self-attention and a feed-forward block, a LayerNorm after each: Marian, BART."""

    PARTS = {"self_attn": "Attention"}
    MODULES = {
        "self_attn_layer_norm": "self_attn_layer_norm",
        "self_attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "self_attn.out": "self_attn.out_proj",
        "final_layer_norm": "final_layer_norm",
        "feed_forward.fc1": "fc1",
        "feed_forward.fc2": "fc2",
    }
    SOURCES = sources(MODULES)
    attends = attrgetter("self_attn")
    SHAPE = at(heads="self_attn.num_heads", activation="activation_fn")
    SETTINGS = at(
        dropout="dropout",
        activation_dropout="activation_dropout",
        attention_dropout="self_attn.dropout",
        softmax_scale="self_attn.scaling",
        layer_norm_epsilon=("self_attn_layer_norm.eps", "final_layer_norm.eps"),
    )


class MarianDecoderLayer(FusedLayer):
    """Causal self-attention, cross-attention, feed-forward block, a LayerNorm after each."""

    causal, CROSS = True, True
    PARTS = {"self_attn": "Attention", "encoder_attn": "Attention"}
    MODULES = MarianEncoderLayer.MODULES | {
        "encoder_attn_layer_norm": "encoder_attn_layer_norm",
        "encoder_attn.query": "encoder_attn.q_proj",
        "encoder_attn.key_value": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
        "encoder_attn.out": "encoder_attn.out_proj",
    }
    SOURCES = sources(MODULES)
    attends = attrgetter("self_attn")
    SHAPE = at(heads=("self_attn.num_heads", "encoder_attn.num_heads"), activation="activation_fn")
    SETTINGS = at(
        dropout="dropout",
        activation_dropout="activation_dropout",
        attention_dropout=("self_attn.dropout", "encoder_attn.dropout"),
        softmax_scale=("self_attn.scaling", "encoder_attn.scaling"),
        layer_norm_epsilon=[
            f"{one}_layer_norm.eps" for one in ("self_attn", "encoder_attn", "final")
        ],
    )

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        return self.float_class.forward(self, x, mask, side.states)


class MBartEncoderLayer(MarianEncoderLayer):
    """An encoder layer with LayerNorms before its blocks: mBART, M2M100 (NLLB), Pegasus."""

    FIXED = {"pre_norm": True}


class MBartDecoderLayer(MarianDecoderLayer):
    """A decoder layer with LayerNorms before its blocks."""

    FIXED = {"pre_norm": True}
