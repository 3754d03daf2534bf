"""What the benchmarks of training steps train: fairseq's translation models and batches, made
without data files."""

import contextlib
import logging
import math
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.modules import SinusoidalPositionalEmbedding
from fairseq.optim.adam import Adam as FairseqAdam
from fairseq.tasks.translation import TranslationTask
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import lsq.fairseq  # noqa: F401  (registers lsq_transformer and its criterion)
from lsq.fairseq.memory import made_up_dictionary
from lsq.fairseq.model import LSQModel
from lsq.optim import Adam

# a task of fairseq's lets every library say everything
logging.getLogger().setLevel(logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and of a batch."""

    hidden: int = 512
    feed_forward: int = 2048
    layers: int = 6
    """Encoder layers, and as many decoder layers."""
    heads: int = 8
    vocabulary: int = 32000
    """Joined, with its special symbols."""
    sentences: int = 64
    length: int = 32
    """Tokens of the longest source and of the longest target, with the end symbol."""
    dropout: float = 0.1
    label_smoothing: float = 0.1


QUICK = Shape(hidden=32, feed_forward=64, layers=1, heads=2, vocabulary=64, sentences=4, length=8)


FAIRSEQ = ["--arch", "transformer", "--criterion", "label_smoothed_cross_entropy"]
"""fairseq-train's options for its own Transformer."""
LSQ = ["--arch", "lsq_transformer", "--criterion", "lsq_label_smoothed_cross_entropy"]
"""fairseq-train's options for lsq's."""


def batch(shape: Shape, *, padded: bool, seed: int) -> dict:
    """Random sentences, put together by fairseq's own collater.

    Args:
        padded: draw each length between half of `shape.length` and all of it, instead of filling
            every place.
        seed: of the tokens and lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    symbols = Dictionary()

    def sentence(first: bool) -> torch.Tensor:
        shortest = shape.length // 2 if padded and not first else shape.length
        length = int(torch.randint(shortest, shape.length + 1, (), generator=generator))
        words = torch.randint(
            symbols.nspecial, shape.vocabulary, (length - 1,), generator=generator
        )
        return torch.cat([words, torch.tensor([symbols.eos()])])

    samples = [
        {"id": number, "source": sentence(number == 0), "target": sentence(number == 0)}
        for number in range(shape.sentences)
    ]
    return collate(samples, symbols.pad(), symbols.eos())


class Side:
    """One way to train: a model, its criterion, its optimizer."""

    def __init__(
        self,
        shape: Shape,
        *,
        arguments: list[str],
        autocast: bool = False,
        change: Callable | None = None,
    ):
        """Build it.

        Args:
            arguments: fairseq-train's options --arch, --criterion and those of the model.
            autocast: run forward passes under torch.autocast in bfloat16.
            change: called with the model before the optimizer is made.
        """
        self.model, self.criterion = build(shape, parse(shape, arguments))
        if change is not None:
            change(self.model)
        # each as `lsq train` takes it by itself
        adam = Adam if isinstance(self.model, LSQModel) else FairseqAdam
        self.optimizer = adam(self.model.parameters(), lr=5e-4, betas=(0.9, 0.98))
        self.autocast = autocast

    def loss(self, sample: dict) -> torch.Tensor:
        context = (
            torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        )
        with context:
            return self.criterion(self.model, sample)[0]

    def backward(self, sample: dict, loss: torch.Tensor) -> None:
        (loss / sample["ntokens"]).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, sample: dict) -> None:
        self.backward(sample, self.loss(sample))
        self.update()


def build(shape: Shape, chosen: Namespace) -> tuple[torch.nn.Module, torch.nn.Module]:
    symbols = made_up_dictionary(shape.vocabulary)
    task = TranslationTask(chosen, symbols, symbols)
    torch.manual_seed(1)
    model = ARCH_MODEL_REGISTRY[chosen.arch].build_model(chosen, task).train()
    return model, task.build_criterion(chosen)


def parse(shape: Shape, arguments: list[str]) -> Namespace:
    """fairseq-train's options for a model of this shape."""
    sizes = {
        "embed-dim": shape.hidden,
        "ffn-embed-dim": shape.feed_forward,
        "layers": shape.layers,
        "attention-heads": shape.heads,
    }
    given = {
        f"--{half}-{key}": size for half in ("encoder", "decoder") for key, size in sizes.items()
    }
    given |= {f"--max-{side}-positions": max(1024, shape.length) for side in ("source", "target")}
    given |= {"--dropout": shape.dropout, "--label-smoothing": shape.label_smoothing}
    words = [word for option in given.items() for word in map(str, option)]
    given = ["unused-data-folder", *arguments, "--share-all-embeddings", *words]
    return options.parse_args_and_arch(options.get_training_parser(), given)


def torchao_int8(model: torch.nn.Module) -> None:
    """Make every linear layer torchao's: int8 products forward and backward, scales from each row.

    torchao takes views of a layer's input and gradient, which fairseq does not always make
    contiguous.

    Raises:
        ImportError: torchao is not installed, or does not fit this torch.
    """
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
            module.register_forward_hook(_contiguous_gradient)
    call_projections(model)


def _contiguous_gradient(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.contiguous())


def call_projections(model: torch.nn.Module) -> None:
    """Let fairseq's attention call its linear layers instead of passing weights to torch."""
    for module in model.modules():
        if hasattr(module, "_set_skip_embed_dim_check"):
            module._set_skip_embed_dim_check()


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

    def __init__(self, shape: Shape, *, cross: bool):
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
    """The encoder, or with `cross` the decoder, with its embedding."""

    def __init__(self, shape: Shape, embed_tokens: nn.Embedding, *, cross: bool):
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
    """From tokens to the label-smoothed loss; source, target and projection share a table."""

    def __init__(self, shape: Shape):
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
        """Copy the weights of fairseq's model, from its state_dict()."""

        def found(name: str) -> torch.Tensor:
            for joined, parts in JOINED.items():
                if f".{joined}." in name:
                    return torch.cat([theirs[name.replace(joined, part)] for part in parts])
            return theirs[name]

        self.load_state_dict({name: found(name) for name in self.state_dict()})


class PlainSide(Side):
    """Plain PyTorch, from the weights of fairseq's sides."""

    def __init__(self, shape: Shape, *, autocast: bool = True, backend: str | None = None):
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
        self.model.take(build(shape, parse(shape, FAIRSEQ))[0].state_dict())
        if backend is not None:
            self.model.compile(backend=backend)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True
        )
        self.autocast = autocast

    def loss(self, sample: dict) -> torch.Tensor:
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
