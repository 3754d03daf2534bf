"""Shape and behaviour of layers."""

from dataclasses import dataclass, field

from lsq.config.checks import (
    check_dimension,
    require_choice,
    require_positive,
    require_share,
    require_whole,
)
from lsq.config.quantization import QuantConfig
from lsq.quant.pruning import check_width

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "squared_relu")
NORMS = ("layer", "rms")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embeddings (RoFormer, Su et al. 2021), in halves as Llama's."""

    positions: int
    """Tokens of the longest sequence."""
    base: float = 10000.0
    """Column i of R / 2 turns by position * base ** (-2 i / R)."""
    width: int | None = None
    """R, the first columns of a head, which are rotated; None: all."""

    def __post_init__(self) -> None:
        require_whole("positions", self.positions)
        require_positive("base", self.base)
        if self.width is not None and (
            not isinstance(self.width, int) or self.width < 2 or self.width % 2
        ):
            raise ValueError(f"width is {self.width!r}; it must be an even number above 0, or None")

    def columns(self, head: int) -> int:
        """Return R for heads of so many columns; raises ValueError if they cannot turn."""
        found = head if self.width is None else self.width
        if found > head or found % 2:
            raise ValueError(
                f"{found} columns of a head cannot turn; give an even number up to its width,"
                f" {head}"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class RelativeBias:
    """Biases of scores by the distance of key and query: a learned number for each head and bucket
    of distances (T5, Raffel et al. 2020). Half of the buckets are of one distance each, the others
    of ranges that grow."""

    buckets: int = 32
    """Rows of the table; in attention that is not causal, half of them for keys behind the query.
    """
    farthest: int = 128
    """Distance from which on all are in one bucket."""
    shared: bool = False
    """Whether the table is one for several layers: it comes along with each pass, and is no
    parameter of the layer."""

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
    """Low-rank adapters (LoRA, Hu et al. 2022) of one weight, trained in floats beside it."""

    weight: str
    """The name of the weight in the layer."""
    rank: int
    """Rank, summed over the projections that the weight joins."""
    dropout: float = 0.0
    """Dropout of their inputs."""

    def __post_init__(self):
        require_share("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape and behaviour of one encoder or decoder layer; the names are fairseq's."""

    hidden: int
    """Width of the residual stream, H."""
    heads: int
    """Attention heads; must divide `hidden`."""
    kv_heads: int | None = None
    """Heads of keys and of values; must divide `heads`, of which groups share one.

    None: as many as `heads`.
    """
    head_width: int | None = None
    """Columns of a head; None: hidden / heads."""
    softmax_scale: float | None = None
    """Softmax scale. Default: head_width ** -0.5."""
    window: int | None = None
    """Tokens, its own included, that a token sees in causal self-attention; None: all before."""
    rotary: Rotary | None = None
    """Rotary embeddings of queries and keys of self-attention; None: none."""
    qk_norm: float | None = None
    """Epsilon of an RMSNorm of each head of queries and keys before they turn, as Qwen3 has it;
    None: there is none."""
    relative_bias: RelativeBias | None = None
    """Bias of self-attention scores by the distance of key and query; None: none."""
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
    """Whether those of queries, keys and values have one; None: as the others."""
    in_out: bool = False
    """Whether weights are [inputs, outputs], as GPT-2 has them, and not [outputs, inputs]."""
    pre_norm: bool = False
    """A norm before each block (True) or after its residual addition (False)."""
    norm: str = "layer"
    """"layer" (LayerNorm, as fairseq has it) or "rms" (RMSNorm, which has no bias)."""
    layer_norm_epsilon: float = 1e-5
    """Epsilon of either norm."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters of its weights."""
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
        """Heads of keys."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_columns(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def query_columns(self) -> int:
        """Columns of all heads of queries."""
        return self.heads * self.head_columns

    @property
    def key_columns(self) -> int:
        """Columns of all heads of keys, and of all heads of values."""
        return self.of_keys * self.head_columns
