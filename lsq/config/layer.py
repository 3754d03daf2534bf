"""Shape and behaviour of layers."""

from dataclasses import dataclass, field
from functools import partial

from lsq.config.checks import (
    accept,
    check_dimension,
    require_choice,
    require_positive,
    require_share,
    require_whole,
    under_new_names,
)
from lsq.config.quantization import QuantConfig
from lsq.quant.pruning import check_width

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "squared_relu")
NORMS = ("layer", "rms")
RENAMED = {
    "key_heads": "kv_heads",
    "score_factor": "softmax_scale",
    "head_norm": "qk_norm",
    "by_inputs": "in_out",
}
"""Fields of LayerConfig in version 0.1 -> their new names."""


@accept(partial(under_new_names, renamed={"places": "positions"}))
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embeddings (RoFormer, Su et al. 2021), which rotate halves as Llama's do."""

    positions: int
    """Length of the longest sequence, in tokens."""
    base: float = 10000.0
    """The angle of column i < R / 2 is position * base ** (-2 i / R)."""
    width: int | None = None
    """R: the first R columns of each head are rotated; None: all."""

    def __post_init__(self) -> None:
        require_whole("positions", self.positions)
        require_positive("base", self.base)
        if self.width is not None and (
            not isinstance(self.width, int) or self.width < 2 or self.width % 2
        ):
            raise ValueError(f"width is {self.width!r}; it must be an even number above 0, or None")

    def columns(self, head: int) -> int:
        """Return R for heads of `head` columns; ValueError if it is odd or above `head`."""
        found = head if self.width is None else self.width
        if found > head or found % 2:
            raise ValueError(
                f"{found} columns of a head cannot turn; give an even number up to its width,"
                f" {head}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """Biases of scores by the distance of key and query (T5, Raffel et al. 2020).

    Each head learns a number for each bucket of distances. Half of the buckets hold one distance
    each, the others hold growing ranges.
    """

    buckets: int = 32
    """Rows of the table; without `causal`, half of them are for keys behind the query."""
    farthest: int = 128
    """All distances from this one on share a bucket."""
    shared: bool = False
    """Whether several layers share the table: it is an input of each pass, and no parameter."""

    def __post_init__(self) -> None:
        for name in ("buckets", "farthest"):
            require_whole(name, getattr(self, name))
        if self.buckets % 4 or self.farthest <= self.buckets // 2:
            raise ValueError(
                f"buckets is {self.buckets} and farthest {self.farthest}; buckets must be a"
                " multiple of 4, and farthest above half of them"
            )


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters (LoRA, Hu et al. 2022) of one weight, trained in floats."""

    weight: str
    """The name of the weight in the layer."""
    rank: int
    """Rank, summed over the projections that the weight joins."""
    dropout: float = 0.0
    """Dropout of the adapters' input."""

    def __post_init__(self):
        require_share("dropout", self.dropout)


@accept(partial(under_new_names, renamed=RENAMED))
@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape and behaviour of one encoder or decoder layer; the names are fairseq's."""

    hidden: int
    """Width of the residual stream, H."""
    heads: int
    """Attention heads; must divide `hidden`."""
    kv_heads: int | None = None
    """Heads of keys, and of values: each serves a group of `heads`, which it must divide; None: as
    many as `heads`."""
    head_width: int | None = None
    """Columns of a head; None: hidden / heads."""
    softmax_scale: float | None = None
    """Factor of scores before the softmax; None: head_width ** -0.5."""
    window: int | None = None
    """Tokens that a token sees in causal self-attention, itself included; None: all before it."""
    rotary: Rotary | None = None
    """Rotary embeddings of queries and keys in self-attention; None: no rotation."""
    qk_norm: float | None = None
    """Epsilon of an RMSNorm of query and key heads before rotation, as in Qwen3; None: no norm."""
    relative_bias: RelativeBias | None = None
    """Biases of self-attention scores by the distance of key and query; None: no biases."""
    feed_forward: int
    """Inner width of the feed-forward block, F."""
    dropout: float = 0.0
    """Dropout before every residual addition."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    activation_dropout: float = 0.0
    """Dropout after the feed-forward activation."""
    activation: str = "relu"
    """"relu", "gelu" (the exact form, with erf), "gelu_tanh" (its approximation), "silu" or
    "squared_relu"."""
    gated: bool = False
    """Whether the activation's result is multiplied by another projection of the same width
    (SwiGLU, GEGLU)."""
    bias: bool = True
    """Whether projections have a bias."""
    head_bias: bool | None = None
    """Whether projections to queries, keys and values have a bias; None: as `bias` says."""
    in_out: bool = False
    """Whether weights are [inputs, outputs], as in GPT-2, instead of [outputs, inputs]."""
    pre_norm: bool = False
    """Whether a norm precedes each block (True) or follows its residual addition (False)."""
    norm: str = "layer"
    """"layer" (LayerNorm, as fairseq has it) or "rms" (RMSNorm, which has no bias)."""
    layer_norm_epsilon: float = 1e-5
    """Epsilon of LayerNorm or RMSNorm."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters of the layer's weights."""
    quant: QuantConfig = field(default_factory=QuantConfig)

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "feed_forward"):
            require_whole(name, getattr(self, name))
        for name in ("kv_heads", "head_width", "window"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        if self.hidden % self.heads and self.head_width is None:
            raise ValueError(f"hidden size {self.hidden} is not divisible by {self.heads} heads")
        if self.heads % self.of_keys:
            raise ValueError(f"{self.heads} heads are not divisible by {self.of_keys} kv_heads")
        if self.rotary is not None:
            self.rotary.columns(self.head_columns)
        if self.softmax_scale is not None:
            require_positive("softmax_scale", self.softmax_scale)
        if self.qk_norm is not None:
            require_positive("qk_norm", self.qk_norm)
            if self.rotary is None:
                raise ValueError(
                    f"qk_norm is {self.qk_norm!r}, but only heads that turn have norms: give"
                    " `rotary`"
                )
        if self.quant.coded:
            for name in ("hidden", "feed_forward"):
                check_dimension(name, getattr(self, name))
            check_dimension("the width of all heads of queries", self.query_columns)
            check_dimension(
                "the width of all queries, keys and values",
                self.query_columns + 2 * self.key_columns,
            )
        if self.quant.pruning is not None:
            for name in ("hidden", "feed_forward", "query_columns"):
                check_width(name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            require_share(name, getattr(self, name))
        require_choice("activation", self.activation, ACTIVATIONS)
        require_choice("norm", self.norm, NORMS)
        require_positive("layer_norm_epsilon", self.layer_norm_epsilon)

    @property
    def biased_heads(self) -> bool:
        """Whether projections of queries, keys and values have a bias."""
        return self.bias if self.head_bias is None else self.head_bias

    @property
    def of_keys(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_columns(self) -> int:
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def query_columns(self) -> int:
        return self.heads * self.head_columns

    @property
    def key_columns(self) -> int:
        """Columns of all heads of keys, and of all heads of values."""
        return self.of_keys * self.head_columns
