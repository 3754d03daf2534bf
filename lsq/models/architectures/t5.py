"""Blocks of T5 and mT5: an encoder's and a decoder's.

All blocks of a stack add the biases of one table to the scores of their self-attention. The first
block has the table; the others are given the biases [1, N, T, T] of all pairs that it makes of it.
These carry the table along; where they have lost it, or a block that is not fused has made them, it
is read off them. So gradients find their way back in any case, and whoever reads the biases next
need not be fused. T time, N heads.
"""

from functools import lru_cache

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig, RelativeBias
from lsq.layers.packing import Packing
from lsq.layers.positions import bucket_of_distances
from lsq.layers.torch_compile import beside_the_graph
from lsq.models.fused_layer import EncoderOutput, FusedLayer, SideInputs, cache_of
from lsq.models.reading import activation_of, biases, dropout_of, plain_linears, the_same

SELF_ATTENTION = {
    "self_attn_layer_norm.weight": ("layer.0.layer_norm.weight",),
    "self_attn.qkv_weight": tuple(f"layer.0.SelfAttention.{name}.weight" for name in "qkv"),
    "self_attn.out_weight": ("layer.0.SelfAttention.o.weight",),
}
TABLE = "_lsq_table"
"""The attribute of biases of pairs that is the table [buckets, N] they are made of."""
CROSS_ATTENTION = {
    "encoder_attn_layer_norm.weight": ("layer.1.layer_norm.weight",),
    "encoder_attn.query_weight": ("layer.1.EncDecAttention.q.weight",),
    "encoder_attn.key_value_weight": tuple(
        f"layer.1.EncDecAttention.{name}.weight" for name in "kv"
    ),
    "encoder_attn.out_weight": ("layer.1.EncDecAttention.o.weight",),
}


def _feed_forward(layer: str) -> dict[str, tuple[str, ...]]:
    """Where its parameters are, with a gate or without one."""
    names = {"fc1": "wi", "gate": "wi_0", "up": "wi_1", "fc2": "wo"}
    found = {
        f"feed_forward.{name}_weight": (f"{layer}.DenseReluDense.{own}.weight",)
        for name, own in names.items()
    }
    return found | {"final_layer_norm.weight": (f"{layer}.layer_norm.weight",)}


def _parts(last: int) -> dict[str, str]:
    """The modules of a block whose feed-forward part has this number."""
    cross = (
        {"layer.1": "LayerCrossAttention", "layer.1.EncDecAttention": "Attention"}
        if last > 1
        else {}
    )
    norms = {f"layer.{number}.layer_norm": "LayerNorm" for number in range(last + 1)}
    dense = {f"layer.{last}": "LayerFF", f"layer.{last}.DenseReluDense": "ActDense"}
    return {
        "layer.0": "LayerSelfAttention",
        "layer.0.SelfAttention": "Attention",
        **cross,
        **norms,
        **dense,
    }


class EncoderBlock(FusedLayer):
    """Self-attention with biases by distance and a feed-forward block, an RMSNorm before each."""

    SOURCES, PARTS, causal = SELF_ATTENTION | _feed_forward("layer.1"), _parts(1), False
    INPUTS = ("layer.0.SelfAttention.relative_attention_bias.weight",)

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attentions, dense = EncoderBlock.attentions(layer), layer.layer[-1].DenseReluDense
        gated = hasattr(dense, "wi_0")
        inner, *others = plain_linears(dense, *(("wi_0", "wi_1") if gated else ("wi",)), "wo")
        for one in attentions:
            others += plain_linears(one, "q", "k", "v", "o")
        if biases(inner, *others):
            raise ValueError("its projections have biases")
        relative = RelativeBias(
            buckets=attentions[0].relative_attention_num_buckets,
            farthest=attentions[0].relative_attention_max_distance,
            shared=True,
        )
        return LayerConfig(
            hidden=attentions[0].d_model,
            heads=the_same("heads", [one.n_heads for one in attentions]),
            head_width=the_same("widths of heads", [one.key_value_proj_dim for one in attentions]),
            relative_bias=relative,
            feed_forward=inner.out_features,
            activation=activation_of(dense.act),
            gated=gated,
            bias=False,
            pre_norm=True,
            norm="rms",
            quant=quantization,
            **EncoderBlock.settings(layer),
        )

    @staticmethod
    def settings(layer: nn.Module) -> dict[str, object]:
        attentions, parts = EncoderBlock.attentions(layer), list(layer.layer)
        return {
            "dropout": dropout_of(*(one.dropout for one in parts)),
            "activation_dropout": parts[-1].DenseReluDense.dropout.p,
            "attention_dropout": the_same(
                "dropouts of attention", [one.dropout for one in attentions]
            ),
            "softmax_scale": the_same("factors of scores", [one.scaling for one in attentions]),
            "layer_norm_epsilon": the_same(
                "epsilons of norms", [one.layer_norm.variance_epsilon for one in parts]
            ),
        }

    @staticmethod
    def attentions(layer: nn.Module) -> list[nn.Module]:
        return [
            layer.layer[0].SelfAttention,
            *([layer.layer[1].EncDecAttention] if layer.is_decoder else []),
        ]

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        states = side.states
        return self.float_class.forward(self, x, mask, side.pairs, states)[0]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask=None,
        position_bias: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask=None,
        encoder_decoder_position_bias: torch.Tensor | None = None,
        **options,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        packing, encoder_out = (
            self.packing(hidden_states, attention_mask, options, cache_of(options)),
            None,
        )
        if packing is not None and self.CROSS and encoder_hidden_states is not None:
            encoder_out = self.encoder_output(encoder_hidden_states, encoder_attention_mask)
        biased = (
            position_bias is not None or self.layer[0].SelfAttention.has_relative_attention_bias
        )
        if packing is None or not biased or (encoder_out is None) is self.CROSS:
            return self.own_pass(
                hidden_states,
                attention_mask,
                position_bias,
                encoder_hidden_states,
                encoder_attention_mask,
                encoder_decoder_position_bias,
                **options,
            )
        return *self._biased(
            hidden_states, packing, encoder_out, position_bias
        ), encoder_decoder_position_bias

    @beside_the_graph
    def _biased(
        self,
        x: torch.Tensor,
        packing: Packing,
        encoder_out: EncoderOutput | None,
        pairs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`fused` with biases of pairs [1, N, T, T], given or made here -> (its result, the
        biases)."""
        if pairs is None:
            attention = self.layer[0].SelfAttention
            pairs = attention.compute_bias(packing.shape[1], packing.shape[1])
            # A copy: under FSDP2 the weight is gone when other blocks run.
            setattr(pairs, TABLE, attention.relative_attention_bias.weight.clone())
        table = getattr(pairs, TABLE, None)
        if table is None:
            table = _table_of(pairs, self.config.relative_bias, self.causal)
        return self.fused(x, packing, encoder_out=encoder_out, bias=table, pairs=pairs), pairs


class DecoderBlock(EncoderBlock):
    """Causal self-attention with biases, attention to an encoder's output and a feed-forward block,
    an RMSNorm before each.
    """

    SOURCES, PARTS = SELF_ATTENTION | CROSS_ATTENTION | _feed_forward("layer.2"), _parts(2)
    causal, CROSS = True, True


def block_class(layer: nn.Module) -> type[FusedLayer]:
    """What a T5Block becomes."""
    return DecoderBlock if layer.is_decoder else EncoderBlock


def _table_of(biases: torch.Tensor, relative: RelativeBias, causal: bool) -> torch.Tensor:
    """Biases [1, N, T, T] of all pairs -> their table [buckets, N], 0 for distances that there are
    not."""
    query, key, known = _pair_of_buckets(relative, biases.shape[3], causal, biases.device)
    return biases[0, :, query, key].t() * known


@lru_cache(maxsize=64)
def _pair_of_buckets(
    relative: RelativeBias, time: int, causal: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each bucket a query int64 [buckets] and a key int64 [buckets] whose distance is in it,
    and bool [buckets, 1] whether sentences of that length have such a pair.
    """
    bucket, nearest = bucket_of_distances(relative, causal).tolist(), {}
    for distance in sorted(range(-relative.farthest, relative.farthest + 1), key=abs):
        nearest.setdefault(bucket[distance + relative.farthest], distance)
    found = [nearest.get(number, time) for number in range(relative.buckets)]
    known = [abs(distance) < time for distance in found]
    query = [
        max(0, -distance) if there else 0 for distance, there in zip(found, known, strict=True)
    ]
    key = [max(0, distance) if there else 0 for distance, there in zip(found, known, strict=True)]
    with torch.inference_mode(False):
        made = (torch.tensor(one, device=device) for one in (query, key, known))
        return next(made), next(made), next(made)[:, None]
