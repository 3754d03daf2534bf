"""Blocks of encoders and decoders of T5 and mT5. T time, N heads.

All blocks of a stack add biases of one table to scores. The first block hands on the biases of all
pairs of tokens, [1, N, T, T], with the table as their attribute; without it, the table is
recovered from the biases.
"""

from functools import lru_cache
from operator import attrgetter

import torch
from torch import nn

from lsq.config import RelativeBias
from lsq.layers.module import beside_the_graph
from lsq.layers.packing import Packing
from lsq.layers.positions import bucket_of_distances
from lsq.models.fused_layer import FusedLayer, SideInputs, cache_of
from lsq.models.reading import Attributes, at, sources

TABLE = "_lsq_table"
"""The attribute of biases of pairs that holds their table [buckets, N]."""
SELF, OTHER = "layer.0.SelfAttention", "layer.1.EncDecAttention"


def _modules(last: int) -> dict[str, str | list[str]]:
    """Return paths of the modules of a block whose feed-forward part is layer.`last`."""
    dense = f"layer.{last}.DenseReluDense"
    cross = {
        "encoder_attn_layer_norm": "layer.1.layer_norm",
        "encoder_attn.query": f"{OTHER}.q",
        "encoder_attn.key_value": [f"{OTHER}.k", f"{OTHER}.v"],
        "encoder_attn.out": f"{OTHER}.o",
    }
    return {
        "self_attn_layer_norm": "layer.0.layer_norm",
        "self_attn.qkv": [f"{SELF}.{name}" for name in "qkv"],
        "self_attn.out": f"{SELF}.o",
        **(cross if last > 1 else {}),
        "feed_forward.fc1": f"{dense}.wi",
        "feed_forward.gate": f"{dense}.wi_0",
        "feed_forward.up": f"{dense}.wi_1",
        "feed_forward.fc2": f"{dense}.wo",
        "final_layer_norm": f"layer.{last}.layer_norm",
    }


def _parts(last: int) -> dict[str, str]:
    cross = {"layer.1": "LayerCrossAttention", OTHER: "Attention"} if last > 1 else {}
    norms = {f"layer.{number}.layer_norm": "LayerNorm" for number in range(last + 1)}
    dense = {f"layer.{last}": "LayerFF", f"layer.{last}.DenseReluDense": "ActDense"}
    return {"layer.0": "LayerSelfAttention", SELF: "Attention", **cross, **norms, **dense}


def _shape(last: int, *attentions: str) -> Attributes:
    return at(
        heads=[f"{one}.n_heads" for one in attentions],
        head_width=[f"{one}.key_value_proj_dim" for one in attentions],
        activation=f"layer.{last}.DenseReluDense.act",
    )


def _settings(last: int, *attentions: str) -> Attributes:
    parts = [f"layer.{number}" for number in range(last + 1)]
    return at(
        dropout=[f"{part}.dropout.p" for part in parts],
        activation_dropout=f"layer.{last}.DenseReluDense.dropout.p",
        attention_dropout=[f"{one}.dropout" for one in attentions],
        softmax_scale=[f"{one}.scaling" for one in attentions],
        layer_norm_epsilon=[f"{part}.layer_norm.variance_epsilon" for part in parts],
    )


class EncoderBlock(FusedLayer):
    """Self-attention with biases by distance and a feed-forward block, an RMSNorm before each."""

    PARTS, MODULES = _parts(1), _modules(1)
    SOURCES = sources(MODULES, bias=False, norm_bias=False)
    INPUTS = (f"{SELF}.relative_attention_bias.weight",)
    attends = attrgetter(SELF)
    FIXED = {"pre_norm": True, "norm": "rms"}
    SHAPE, SETTINGS = _shape(1, SELF), _settings(1, SELF)

    @classmethod
    def shape(cls, layer: nn.Module) -> dict[str, object]:
        attention = layer.layer[0].SelfAttention
        relative = RelativeBias(
            buckets=attention.relative_attention_num_buckets,
            farthest=attention.relative_attention_max_distance,
            shared=True,
        )
        return {**super().shape(layer), "relative_bias": relative}

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
        """Run `fused` with biases of pairs, made here if not given; return both results."""
        if pairs is None:
            attention = self.layer[0].SelfAttention
            pairs = attention.compute_bias(packing.shape[1], packing.shape[1])
            # a copy: under FSDP2 the weight is gone when other blocks run
            setattr(pairs, TABLE, attention.relative_attention_bias.weight.clone())
        table = getattr(pairs, TABLE, None)
        if table is None:
            table = _table_of(pairs, self.config.relative_bias, self.causal)
        return self.fused(x, packing, bias=table, pairs=pairs, **side), pairs


class DecoderBlock(EncoderBlock):
    """A causal EncoderBlock with cross-attention between its two parts."""

    causal, CROSS = True, True
    PARTS, MODULES = _parts(2), _modules(2)
    SOURCES = sources(MODULES, bias=False, norm_bias=False)
    SHAPE, SETTINGS = _shape(2, SELF, OTHER), _settings(2, SELF, OTHER)


def block_class(layer: nn.Module) -> type[FusedLayer]:
    """Return the class that a T5Block becomes."""
    return DecoderBlock if layer.is_decoder else EncoderBlock


def _table_of(biases: torch.Tensor, relative: RelativeBias, causal: bool) -> torch.Tensor:
    """Recover the table [buckets, N] from biases of pairs [1, N, T, T], 0 for absent distances."""
    query, key, known = _pair_of_buckets(relative, biases.shape[3], causal, biases.device)
    return biases[0, :, query, key].t() * known


@lru_cache(maxsize=64)
def _pair_of_buckets(
    relative: RelativeBias, time: int, causal: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a query and a key of each bucket, [buckets], and whether they exist, [buckets, 1]."""
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
