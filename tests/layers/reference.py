"""The layers again, in plain PyTorch: float products of rounded numbers, differentiated by
autograd.

Independent of programs, and slow: others are tested against it, in float64. Shapes as in the
modules.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch.nn import functional

from lsq.config import LayerConfig, QuantConfig, RelativeBias
from lsq.ops.nonlinearity import SLOPE_UNIT
from tests.quant.fake import fake_quantize

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: functional.relu(x) ** 2,
}
STEPPED = ("gelu", "gelu_tanh", "silu")
"""Whose slope is bounded, and takes more than two values."""
Dropout = Callable[[torch.Tensor, float], torch.Tensor]


class ReferenceLayer:
    """Computes what a module of `config` does, from its parameters by name, in any float dtype.

    `dropout`: called for each dropout with (x, probability), in the order of the forward pass.
    """

    def __init__(
        self,
        config: LayerConfig,
        parameters: dict[str, torch.Tensor],
        dropout: Dropout | None = None,
    ):
        self.config, self.parameters = config, parameters
        self.dropout = dropout or (lambda x, probability: x)

    def round(self, x: torch.Tensor, clip: str) -> torch.Tensor:
        """x after rounding under the clip of that name; x itself in float mode."""
        quant = self.config.quant
        if not quant.quantized:
            return x
        return fake_quantize(x, self.parameters[clip], quant.bits, quant.clip_gradient)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Product of rounded x with the rounded weight of that name, and its bias."""
        weight = self.round(self.parameters[name + "_weight"], name + "_weight_clip")
        return functional.linear(x, weight, self.parameters.get(name + "_bias"))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation; without a gate, bounded slopes are integers where anything is rounded."""
        activation = ACTIVATIONS[self.config.activation]
        return _Stepped.apply(x, activation) if self.steps else activation(x)

    @property
    def steps(self) -> bool:
        """Whether the slope is kept as integers."""
        return (
            self.config.activation in STEPPED
            and self.config.quant.quantized
            and not self.config.gated
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, N, T, D], of heads of queries or of keys."""
        return x.unflatten(2, (-1, self.config.head_columns)).transpose(1, 2)

    def attend(
        self, q, k, v, prefix: str, padding: torch.Tensor | None, causal: bool, bias=0.0
    ) -> torch.Tensor:
        """Queries [B, T, H], keys and values [B, S, H] -> rounded context [B, T, H]."""
        q, k, v = map(self.split, (q, k, v))
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
        scores = q @ k.transpose(-1, -2) * (self.config.softmax_scale or q.shape[-1] ** -0.5) + bias
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
            window = self.config.window or scores.shape[-1]
            scores = scores.masked_fill(
                torch.ones(scores.shape[-2:]).tril(-window).bool(), float("-inf")
            )
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        probabilities = self.dropout(scores.softmax(-1), self.config.attention_dropout)
        return self.round((probabilities @ v).transpose(1, 2).flatten(2), prefix + "context_clip")

    def self_attention(self, x, prefix: str, padding, causal: bool) -> torch.Tensor:
        """Normalised x [B, T, H] -> the output projection with its bias, before dropout."""
        config = self.config
        sizes = [config.query_columns, config.key_columns, config.key_columns]
        q, k, v = self.linear(self.round(x, prefix + "input_clip"), prefix + "qkv").split(
            sizes, dim=2
        )
        if config.rotary is not None:
            q, k = (
                self.turn(one, f"{prefix}{part}_norm.weight")
                for one, part in ((q, "query"), (k, "key"))
            )
        qkv = self.round(torch.cat([q, k, v], dim=2), prefix + "qkv_clip")
        bias = 0.0
        if config.relative_bias is not None:
            bias = self.parameters[prefix + "relative_bias"][
                buckets(config.relative_bias, x.shape[1], causal)
            ]
            bias = bias.permute(2, 0, 1)
        context = self.attend(*qkv.split(sizes, dim=2), prefix, padding, causal, bias)
        return self.linear(context, prefix + "out")

    def turn(self, x, norm: str) -> torch.Tensor:
        """Queries or keys [B, T, ...], after their norm, if any, turned as complex numbers."""
        config, heads = self.config, self.split(x)
        if config.qk_norm is not None:
            heads = functional.rms_norm(
                heads, heads.shape[-1:], self.parameters[norm], config.qk_norm
            )
        turned = config.rotary.width or config.head_columns
        frequencies = config.rotary.base ** -(
            torch.arange(0, turned, 2, dtype=torch.float64) / turned
        )
        angle = torch.arange(x.shape[1])[:, None] * frequencies
        # as programs are given it
        table = torch.cat([angle.cos(), angle.sin()], dim=1).float().to(x.dtype)
        low, high, stays = heads.split([turned // 2, turned // 2, heads.shape[-1] - turned], dim=-1)
        numbers = torch.complex(low, high) * torch.complex(*table.chunk(2, dim=1))
        return torch.cat([numbers.real, numbers.imag, stays], dim=-1).transpose(1, 2).flatten(2)

    def cross_attention(self, x, memory, prefix: str, padding) -> torch.Tensor:
        """The same over a memory [B, S, H]."""
        q = self.round(
            self.linear(self.round(x, prefix + "input_clip"), prefix + "query"),
            prefix + "query_clip",
        )
        key_value = self.linear(self.round(memory, prefix + "memory_clip"), prefix + "key_value")
        k, v = self.round(key_value, prefix + "key_value_clip").chunk(2, dim=2)
        return self.linear(self.attend(q, k, v, prefix, padding, causal=False), prefix + "out")

    def feed_forward(self, x, prefix: str) -> torch.Tensor:
        """Normalised x [B, T, H] -> [B, T, H], before dropout."""
        config = self.config
        x = self.round(x, prefix + "input_clip")
        if config.gated:
            gate, up = (
                self.round(self.linear(x, prefix + n), f"{prefix}{n}_clip") for n in ("gate", "up")
            )
            x = self.activate(gate) * up
        else:
            x = self.activate(self.linear(x, prefix + "fc1"))
        x = self.dropout(x, config.activation_dropout)
        return self.linear(self.round(x, prefix + "activation_clip"), prefix + "fc2")

    def block(self, x, norm: str, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Residual block around `inner`, pre- or post-norm."""
        before = self.norm(x, norm) if self.config.pre_norm else x
        x = x + self.dropout(inner(before), self.config.dropout)
        return x if self.config.pre_norm else self.norm(x, norm)

    def norm(self, x, name: str) -> torch.Tensor:
        """LayerNorm or RMSNorm of x [..., H], whose backward pass may read integers."""
        weight, bias = self.parameters[name + ".weight"], self.parameters.get(name + ".bias")
        epsilon, centred = self.config.layer_norm_epsilon, self.config.norm == "layer"
        if self.config.quant.quantized:
            return _KeptNorm.apply(x, weight, bias, epsilon, centred)
        if not centred:
            return functional.rms_norm(x, x.shape[-1:], weight, epsilon)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)

    def encoder_layer(
        self, x: torch.Tensor, padding: torch.Tensor | None = None, causal: bool = False
    ) -> torch.Tensor:
        """x [T, B, H], padding bool [B, T] -> [T, B, H]; what padding becomes means nothing."""
        x = x.transpose(0, 1)
        x = self.block(
            x,
            "self_attn_layer_norm",
            lambda x: self.self_attention(x, "self_attn.", padding, causal),
        )
        return self.block(
            x, "final_layer_norm", lambda x: self.feed_forward(x, "feed_forward.")
        ).transpose(0, 1)

    def decoder_layer(
        self, x, memory, padding: torch.Tensor | None = None, own: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, B, H], memory [S, B, H], padding bool [B, S], own padding [B, T] -> [T, B, H]."""
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        x = self.block(
            x,
            "self_attn_layer_norm",
            lambda x: self.self_attention(x, "self_attn.", own, causal=True),
        )
        x = self.block(
            x,
            "encoder_attn_layer_norm",
            lambda x: self.cross_attention(x, memory, "encoder_attn.", padding),
        )
        return self.block(
            x, "final_layer_norm", lambda x: self.feed_forward(x, "feed_forward.")
        ).transpose(0, 1)


def buckets(relative: RelativeBias, time: int, causal: bool) -> torch.Tensor:
    """int64 [T, T]: the buckets of T5's relative positions, pair by pair."""
    found = torch.empty(time, time, dtype=torch.int64)
    for query, key in itertools.product(range(time), range(time)):
        count, first, far = relative.buckets, 0, query - key
        if not causal:
            count //= 2
            first, far = (count if far < 0 else 0), abs(far)
        far, exact = max(far, 0), count // 2
        if far >= exact:
            far = exact + int(
                math.log(far / exact) / math.log(relative.farthest / exact) * (count - exact)
            )
        found[query, key] = first + min(far, count - 1)
    return found


class _KeptNorm(torch.autograd.Function):
    """A norm whose backward pass reads 127ths of each row's largest magnitude."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon, centred):
        normalised, rstd = normalise(x, epsilon, centred)
        step = normalised.abs().amax(-1, keepdim=True) / 127
        ctx.save_for_backward((normalised / step).round().nan_to_num() * step, rstd, weight)
        ctx.centred, ctx.bias = centred, bias is not None
        return normalised * weight + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx, gradient):
        normalised, rstd, weight = ctx.saved_tensors
        scaled = gradient * weight
        through = scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)
        if ctx.centred:
            through = through - scaled.mean(-1, keepdim=True)
        dims = tuple(range(gradient.dim() - 1))
        return (
            rstd * through,
            (gradient * normalised).sum(dims),
            gradient.sum(dims) if ctx.bias else None,
            None,
            None,
        )


def normalise(x: torch.Tensor, epsilon: float, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] with mean square 1 (`centred`: mean 0, too), and its factor [..., 1]."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    rstd = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return x * rstd, rstd


class _Stepped(torch.autograd.Function):
    """An activation whose slope in the backward pass is a multiple of 1 / SLOPE_UNIT."""

    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (slope_of(ctx.activation, x) * SLOPE_UNIT).round() / SLOPE_UNIT, None


def slope_of(activation, x: torch.Tensor) -> torch.Tensor:
    """The derivative of an activation at x."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(activation(leaf).sum(), leaf)[0]


def vocabulary_loss(
    quant: QuantConfig,
    parameters: dict[str, torch.Tensor],
    x,
    target,
    padding_idx: int,
    label_smoothing: float,
):
    """(loss, nll_loss) of VocabularyProjection.loss, from its parameters."""
    weight = parameters["weight"]
    if quant.quantized:
        x = fake_quantize(x, parameters["input_clip"], quant.bits, quant.clip_gradient)
        weight = fake_quantize(weight, parameters["weight_clip"], quant.bits, quant.clip_gradient)
    logs = functional.log_softmax(functional.linear(x, weight), dim=-1)
    counted = target != padding_idx
    nll = -logs.gather(-1, target[..., None]).squeeze(-1)[counted].sum()
    each = label_smoothing / (weight.shape[0] - 1)
    return (1 - label_smoothing - each) * nll - each * logs.sum(-1)[counted].sum(), nll
