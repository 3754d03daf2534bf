"""Small models with what fairseq's plugin has, made of lsq.layers alone: calibrated, with weights
of some size."""

from functools import partial

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import (
    Embedding,
    Packing,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
    programs,
)
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import ALONE
from lsq.layers.model_formats import config_at
from lsq.layers.stack import Stack

PADDING, BOS, EOS, UNK = 1, 0, 2, 3
MIX = "int4,*fc2*=int8,*qkv*=int3/row,decoder.layers.0.*=int2/row,*encoder_attn.out*=ternary/tensor"
"""Formats of weights, by name."""
WHOLE_MIX = "int8,*fc1*=fp4-e2m1/row,decoder.layers.1.*=log3.0/tensor,*output_projection*=int6/row"
"""Formats of weights; layers decode some of them."""


class Dictionary:
    """The numbers of special words."""

    def __init__(self):
        self.bos, self.eos, self.unk = (lambda: BOS), (lambda: EOS), (lambda: UNK)


class SmallStack(Stack, nn.Module):
    """An encoder, or a decoder with a projection."""

    def __init__(self, layers, config, words, **embedding):
        super().__init__()
        self.dictionary, self.padding_idx = Dictionary(), PADDING
        self.embed_tokens = Embedding(words, config.hidden, PADDING, max_positions=64, **embedding)
        self.layers = nn.ModuleList(layers)
        norm = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
        self.layer_norm = (
            norm(config.hidden, eps=config.layer_norm_epsilon) if config.pre_norm else None
        )


class SmallModel(nn.Module):
    """A translation model, or without `encoder_layers` a language model."""

    def __init__(
        self,
        encoder_layers=2,
        decoder_layers=2,
        words=37,
        quant=None,
        tied=True,
        shared=True,
        embedding=None,
        **options,
    ):
        super().__init__()
        quant = QuantConfig(**(quant or {}))
        config = LayerConfig(
            **({"hidden": 48, "heads": 4, "feed_forward": 96, "quant": quant} | options)
        )
        embedding, one = embedding or {}, PackedSequences(rows=1, count=1)

        def configs(side, count, build):
            return [config_at(config, f"{side}.layers.{index}", build) for index in range(count)]

        alone = partial(programs.encoder_layer, config, one)
        self.encoder = None
        if encoder_layers:
            layers = map(TransformerEncoderLayer, configs("encoder", encoder_layers, alone))
            self.encoder = SmallStack(layers, config, words if shared else words + 6, **embedding)
            build = partial(programs.decoder_layer, config, one, one)
            layers = [
                TransformerDecoderLayer(own) for own in configs("decoder", decoder_layers, build)
            ]
        else:
            layers = [
                TransformerEncoderLayer(own, causal=True)
                for own in configs("decoder", decoder_layers, alone)
            ]
        self.decoder = SmallStack(layers, config, words, **embedding)
        if encoder_layers and shared:
            self.encoder.embed_tokens.weight = self.decoder.embed_tokens.weight
        self.decoder.output_projection = VocabularyProjection(
            words,
            config.hidden,
            quant=quant.at("decoder.output_projection", *ALONE),
            weight=self.decoder.embed_tokens.weight if tied else None,
            padding_idx=PADDING,
        )

    def memory(self, sources):
        """(rows of the encoder, their packing) of sentences; nothing for a language model."""
        if self.encoder is None:
            return ()
        packing = Packing(sources == PADDING)
        return self.encoder.last_rows(sources, packing), packing

    @torch.no_grad()
    def forward(self, sources, targets):
        """Logits [B, T, V]."""
        packing = Packing(targets == PADDING)
        rows = self.decoder.last_rows(targets, packing, *self.memory(sources))
        return packing.unpack(self.decoder.output_projection(rows))


def batch(words=37, lengths=(7, 3, 11), seed=0):
    """int64 [B, S], padded at the end, each with the end of a sentence."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.cat([torch.randint(4, words, (n - 1,), generator=generator), torch.tensor([EOS])])
        for n in lengths
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def small_model(**options) -> SmallModel:
    """In eval mode, with clips measured on some batch."""
    torch.manual_seed(0)
    model = SmallModel(**options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    words = options.get("words", 37)
    model(batch(words), batch(words, seed=1))
    return model
