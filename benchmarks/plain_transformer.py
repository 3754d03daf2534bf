"""fairseq's Transformer as PyTorch's own documentation would have it written and trained.

Fused projections of queries, keys and values, scaled_dot_product_attention, cross_entropy with
label smoothing, fused Adam, bfloat16 by autocast over float32 weights; eager, or compiled as one
graph from tokens to the loss.
"""

import contextlib
import math
import os
import shutil

import torch
import transformer
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

PADDING = 1
"""fairseq's index of the padding symbol."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "kv_proj": ("k_proj", "v_proj")}
"""Projections here -> those of fairseq's that are multiplied as one."""


class Attention(nn.Module):
    """Multi-head attention; over `context` if there is any, else over x itself."""

    def __init__(self, hidden: int, heads: int, *, cross: bool):
        super().__init__()
        self.heads = heads
        if cross:
            self.q_proj = nn.Linear(hidden, hidden)
            self.kv_proj = nn.Linear(hidden, 2 * hidden)
        else:
            self.qkv_proj = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(
        self,
        x_BTH: torch.Tensor,
        context_BSH: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; `mask` is added to the products: float [B, 1, 1, S]."""
        if context_BSH is None:
            joined = self.qkv_proj(x_BTH).chunk(3, dim=-1)
        else:
            joined = (self.q_proj(x_BTH), *self.kv_proj(context_BSH).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joined)
        # the flash kernel takes longer for sentences as short as these
        with sdpa_kernel(SDPBackend.MATH):
            attended = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal
            )
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """An encoder layer, or with `cross` a decoder layer; LayerNorm after each residual addition."""

    def __init__(self, shape: transformer.Shape, *, cross: bool):
        super().__init__()
        self.dropout = nn.Dropout(shape.dropout)
        self.self_attn = Attention(shape.hidden, shape.heads, cross=False)
        self.self_attn_layer_norm = nn.LayerNorm(shape.hidden)
        if cross:
            self.encoder_attn = Attention(shape.hidden, shape.heads, cross=True)
            self.encoder_attn_layer_norm = nn.LayerNorm(shape.hidden)
        self.fc1 = nn.Linear(shape.hidden, shape.feed_forward)
        self.fc2 = nn.Linear(shape.feed_forward, shape.hidden)
        self.final_layer_norm = nn.LayerNorm(shape.hidden)

    def forward(
        self, x_BTH: torch.Tensor, context_BSH: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; `mask` is of the source, and added: float [B, 1, 1, S]."""
        decodes = context_BSH is not None
        attended = self.self_attn(x_BTH, mask=None if decodes else mask, causal=decodes)
        x_BTH = self.self_attn_layer_norm(x_BTH + self.dropout(attended))
        if decodes:
            attended = self.encoder_attn(x_BTH, context_BSH, mask=mask)
            x_BTH = self.encoder_attn_layer_norm(x_BTH + self.dropout(attended))
        fed = self.fc2(functional.relu(self.fc1(x_BTH)))
        return self.final_layer_norm(x_BTH + self.dropout(fed))


class Half(nn.Module):
    """The encoder, or with `cross` the decoder."""

    def __init__(self, shape: transformer.Shape, embed_tokens: nn.Embedding, *, cross: bool):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.scale = math.sqrt(shape.hidden)
        table = SinusoidalPositionalEmbedding.get_embedding(
            shape.length + PADDING + 1, shape.hidden, PADDING
        )
        self.register_buffer("positions", table, persistent=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape, cross=cross) for _ in range(shape.layers))

    def forward(
        self, tokens_BT: torch.Tensor, context_BSH: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """int64 [B, T] -> [B, T, H]; see `Layer`."""
        real = tokens_BT != PADDING
        places = real.cumsum(dim=1) * real + PADDING
        x_BTH = self.dropout(
            self.scale * self.embed_tokens(tokens_BT) + functional.embedding(places, self.positions)
        )
        for layer in self.layers:
            x_BTH = layer(x_BTH, context_BSH, mask)
        return x_BTH


class Transformer(nn.Module):
    """From tokens to the label-smoothed loss; one table of embeddings for source, target and
    projection."""

    def __init__(self, shape: transformer.Shape):
        super().__init__()
        table = nn.Embedding(shape.vocabulary, shape.hidden, PADDING)
        self.encoder = Half(shape, table, cross=False)
        self.decoder = Half(shape, table, cross=True)
        # fairseq spreads label smoothing over all words but the target, PyTorch over all.
        self.label_smoothing = shape.label_smoothing * shape.vocabulary / (shape.vocabulary - 1)

    def forward(
        self,
        source_BS: torch.Tensor,
        previous_BT: torch.Tensor,
        target_BT: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Loss, summed over the target's tokens: int64 [B, S], [B, T], [B, T] -> float32 []; for
        mask see `Layer`."""
        context_BSH = self.encoder(source_BS, None, mask)
        x_BTH = self.decoder(previous_BT, context_BSH, mask)
        logits = functional.linear(x_BTH, self.decoder.embed_tokens.weight)
        return functional.cross_entropy(
            logits.flatten(0, 1),
            target_BT.flatten(),
            ignore_index=PADDING,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def take(self, theirs: dict[str, torch.Tensor]) -> None:
        """Copy the weights of fairseq's model, by its state_dict()."""

        def found(name: str) -> torch.Tensor:
            for joined, parts in JOINED.items():
                if f".{joined}." in name:
                    return torch.cat([theirs[name.replace(joined, part)] for part in parts])
            return theirs[name]

        self.load_state_dict({name: found(name) for name in self.state_dict()})


class Side(transformer.Side):
    """A way to train it, from the weights of the sides that are fairseq's."""

    def __init__(
        self, shape: transformer.Shape, *, autocast: bool = True, backend: str | None = None
    ):
        """Build it.

        Args:
            autocast: run forward passes under torch.autocast in bfloat16.
            backend: of torch.compile; None: eager.

        Raises:
            ImportError: there is no C++ compiler, which torch.compile needs.
        """
        compiler = os.environ.get("CXX", "g++")
        if backend == "inductor" and shutil.which(compiler) is None:
            raise ImportError(f"torch.compile needs a C++ compiler, and there is no {compiler}")
        self.model = Transformer(shape).train()
        self.model.take(
            transformer.build(shape, transformer.parse(shape, transformer.FAIRSEQ))[0].state_dict()
        )
        if backend is not None:
            self.model.compile(backend=backend)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True
        )
        self.autocast = autocast

    def loss(self, sample: dict) -> torch.Tensor:
        """Label-smoothed loss, summed over the target's tokens."""
        source = sample["net_input"]["src_tokens"]
        padding = source == PADDING
        mask = None
        if padding.any():
            dtype = torch.bfloat16 if self.autocast else torch.float32
            mask = torch.zeros(source.shape, dtype=dtype).masked_fill(padding, -math.inf)[
                :, None, None
            ]
        context = (
            torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        )
        with context:
            return self.model(
                source, sample["net_input"]["prev_output_tokens"], sample["target"], mask
            )
