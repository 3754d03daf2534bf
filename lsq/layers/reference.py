"""The layers again, in plain PyTorch: float products of rounded numbers, differentiated by autograd.

Independent of programs and fused operations, and slow: every other implementation is tested against it, in float64.
Dropout is given as a function, so that it can draw the same masks as a program. Shapes as in the modules.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from lsq.config import LayerConfig, QuantConfig
from lsq.quant import fake_quantize

Dropout = Callable[[torch.Tensor, float], torch.Tensor]


class ReferenceLayer:
    """Computes what a module computes, from a dict of its parameters (any float dtype, gradients wanted or not).

    Args:
        config: the module's configuration.
        parameters: by the names of the module's state dict.
        dropout: called once for each dropout with (x, probability), in the order of the forward pass.
    """

    def __init__(self, config: LayerConfig, parameters: dict[str, torch.Tensor], dropout: Dropout | None = None):
        self.config, self.parameters = config, parameters
        self.dropout = dropout or (lambda x, probability: x)

    def round(self, x: torch.Tensor, clip: str) -> torch.Tensor:
        """x after rounding under the clip of that name; x itself in float mode."""
        quant = self.config.quant
        if not quant.quantized:
            return x
        return fake_quantize(x, self.parameters[clip], quant.bits, quant.clip_gradient)

    def linear(self, x: torch.Tensor, name: str, output_clip: str | None) -> torch.Tensor:
        """Product of rounded x with rounded weight, rounded again under `output_clip`; without bias."""
        weight = self.round(self.parameters[name], name + "_clip")
        product = functional.linear(x, weight)
        return product if output_clip is None else self.round(product, output_clip)

    def split(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[T * B, H] -> [B, N, T, D]."""
        heads = self.config.heads
        return rows.view(-1, batch, heads, rows.shape[1] // heads).permute(1, 2, 0, 3)

    def attend(self, q, k, v, prefix: str, padding: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """Rows of q, k, v -> rounded context rows."""
        batch = self.batch
        q, k, v = (self.split(tensor, batch) for tensor in (q * (q.shape[1] // self.config.heads) ** -0.5, k, v))
        scores = q @ k.transpose(-1, -2)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        probabilities = self.dropout(scores.softmax(-1), self.config.attention_dropout)
        context = (probabilities @ v).permute(2, 0, 1, 3).reshape(-1, self.config.hidden)
        return self.round(context, prefix + "context_clip")

    def self_attention(self, x, prefix: str, padding, causal: bool) -> torch.Tensor:
        """Normalised rows -> rows of the output projection with its bias, before dropout."""
        p = self.parameters
        qkv = self.linear(self.round(x, prefix + "input_clip"), prefix + "qkv_weight", prefix + "qkv_clip")
        q, k, v = (qkv + p[prefix + "qkv_bias"]).chunk(3, dim=1)
        context = self.attend(q, k, v, prefix, padding, causal)
        return self.linear(context, prefix + "out_weight", prefix + "out_clip") + p[prefix + "out_bias"]

    def cross_attention(self, x, memory, prefix: str, padding) -> torch.Tensor:
        """The same over a memory [S * B, H]."""
        p = self.parameters
        q = self.linear(self.round(x, prefix + "input_clip"), prefix + "query_weight", prefix + "query_clip")
        memory = self.round(memory, prefix + "memory_clip")
        key_value = self.linear(memory, prefix + "key_value_weight", prefix + "key_value_clip")
        k, v = (key_value + p[prefix + "key_value_bias"]).chunk(2, dim=1)
        context = self.attend(q + p[prefix + "query_bias"], k, v, prefix, padding, causal=False)
        return self.linear(context, prefix + "out_weight", prefix + "out_clip") + p[prefix + "out_bias"]

    def feed_forward(self, x, prefix: str) -> torch.Tensor:
        """Normalised rows -> rows, before dropout."""
        p, config = self.parameters, self.config
        x = self.linear(self.round(x, prefix + "input_clip"), prefix + "fc1_weight", prefix + "hidden_clip")
        activation = functional.relu if config.activation == "relu" else functional.gelu
        x = self.dropout(activation(x + p[prefix + "fc1_bias"]), config.activation_dropout)
        x = self.linear(self.round(x, prefix + "activation_clip"), prefix + "fc2_weight", None)
        return x + p[prefix + "fc2_bias"]

    def block(self, x, norm: str, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Residual block around `inner`, pre- or post-norm."""
        before = self.norm(x, norm) if self.config.pre_norm else x
        x = x + self.dropout(inner(before), self.config.dropout)
        return x if self.config.pre_norm else self.norm(x, norm)

    def norm(self, x, name: str) -> torch.Tensor:
        p = self.parameters
        return functional.layer_norm(
            x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], self.config.layer_norm_epsilon
        )

    def encoder_layer(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, B, H], padding bool [B, T] -> [T, B, H]."""
        shape, self.batch = x.shape, x.shape[1]
        rows = x.reshape(-1, shape[2])
        rows = self.block(
            rows, "self_attn_layer_norm", lambda x: self.self_attention(x, "self_attn.", padding, causal=False)
        )
        rows = self.block(rows, "final_layer_norm", lambda x: self.feed_forward(x, "feed_forward."))
        return rows.view(shape)

    def decoder_layer(
        self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, B, H], memory [S, B, H], padding bool [B, S] -> [T, B, H]."""
        shape, self.batch = x.shape, x.shape[1]
        rows, memory = x.reshape(-1, shape[2]), memory.reshape(-1, shape[2])
        rows = self.block(
            rows, "self_attn_layer_norm", lambda x: self.self_attention(x, "self_attn.", None, causal=True)
        )
        rows = self.block(
            rows, "encoder_attn_layer_norm", lambda x: self.cross_attention(x, memory, "encoder_attn.", padding)
        )
        rows = self.block(rows, "final_layer_norm", lambda x: self.feed_forward(x, "feed_forward."))
        return rows.view(shape)


def vocabulary_loss(
    quant: QuantConfig, parameters: dict[str, torch.Tensor], x, target, padding_idx: int, label_smoothing: float
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
