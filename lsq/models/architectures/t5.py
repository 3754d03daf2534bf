"""Blocks of T5 and mT5: an encoder's and a decoder's.

All blocks of a stack add the biases of one table to the scores of their self-attention. The first
block has the table, and passes biases [1, N, T, T] of all pairs on, with the table as an attribute.
A block that gets biases without it, from a block that is not fused, reads the table off them. T
time, N heads.
"""

from functools import lru_cache

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig, RelativeBias
from lsq.layers.module import beside_the_graph
from lsq.layers.packing import Packing
from lsq.layers.positions import bucket_of_distances
from lsq.models.fused_layer import FusedLayer, SideInputs, cache_of
from lsq.models.reading import activation_of, biases, dropout_of, plain_linears, sources, the_same

TABLE = "_lsq_table"
"""The attribute of biases of pairs that is the table [buckets, N] they are made of."""


def _sources(last: int) -> dict[str, tuple[str, ...]]:
    """Paths of the parameters of a block whose feed-forward part has this number, with a gate or
    without one."""
    dense = f"layer.{last}.DenseReluDense"
    cross = {
        "encoder_attn_layer_norm": "layer.1.layer_norm",
        "encoder_attn.query": "layer.1.EncDecAttention.q",
        "encoder_attn.key_value": [f"layer.1.EncDecAttention.{name}" for name in "kv"],
        "encoder_attn.out": "layer.1.EncDecAttention.o",
    }
    modules = {
        "self_attn_layer_norm": "layer.0.layer_norm",
        "self_attn.qkv": [f"layer.0.SelfAttention.{name}" for name in "qkv"],
        "self_attn.out": "layer.0.SelfAttention.o",
        **(cross if last > 1 else {}),
        "feed_forward.fc1": f"{dense}.wi",
        "feed_forward.gate": f"{dense}.wi_0",
        "feed_forward.up": f"{dense}.wi_1",
        "feed_forward.fc2": f"{dense}.wo",
        "final_layer_norm": f"layer.{last}.layer_norm",
    }
    return sources(modules, bias=False, norm_bias=False)


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

    SOURCES, PARTS, causal = _sources(1), _parts(1), False
    INPUTS = ("layer.0.SelfAttention.relative_attention_bias.weight",)

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        attentions, dense = EncoderBlock.attentions(layer), layer.layer[-1].DenseReluDense
        gated = hasattr(dense, "wi_0")
        inner, *linears = plain_linears(dense, *(("wi_0", "wi_1") if gated else ("wi",)), "wo")
        for one in attentions:
            linears += plain_linears(one, "q", "k", "v", "o")
        if biases(inner, *linears):
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
        return self.float_class.forward(self, x, mask, side.pairs, side.states)[0]

    def forward(
        self, hidden_states: torch.Tensor, *arguments, **options
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        options.update(zip(self.positional, arguments, strict=False))
        pairs, cache = options.get("position_bias"), cache_of(options)
        known = {**options, "position_bias": None}
        packing = self.packing(hidden_states, options.get("attention_mask"), known, cache)
        side = None if packing is None else self.side_inputs(options)
        biased = pairs is not None or self.layer[0].SelfAttention.has_relative_attention_bias
        if side is None or not biased:
            return self.own_pass(hidden_states, **options)
        result, pairs = self._biased(hidden_states, packing, pairs, **side)
        return result, pairs, options.get("encoder_decoder_position_bias")

    @beside_the_graph
    def _biased(
        self, x: torch.Tensor, packing: Packing, pairs: torch.Tensor | None, **side
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
        return self.fused(x, packing, bias=table, pairs=pairs, **side), pairs


class DecoderBlock(EncoderBlock):
    """Causal self-attention with biases, attention to an encoder's output and a feed-forward block,
    an RMSNorm before each.
    """

    SOURCES, PARTS, causal, CROSS = _sources(2), _parts(2), True, True


def block_class(layer: nn.Module) -> type[FusedLayer]:
    """Return the class that a T5Block becomes."""
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
    distances = [nearest.get(number, time) for number in range(relative.buckets)]
    known = [abs(distance) < time for distance in distances]
    distances = [distance if there else 0 for distance, there in zip(distances, known, strict=True)]
    with torch.inference_mode(False):
        distance = torch.tensor(distances, device=device)
        known = torch.tensor(known, device=device)[:, None]
        return (-distance).clamp_min(0), distance.clamp_min(0), known
