"""Parts of encoders and decoders behind fairseq's interface: embedding, layers' configurations and
final norm."""

from functools import partial
from typing import Any

from fairseq.utils import safe_getattr
from torch import nn

from lsq.config import LayerConfig
from lsq.layers import Embedding, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.model_formats import config_at
from lsq.layers.stack import Stack


def build_embedding(args: Any, side: str, padding_idx: int, weight: nn.Parameter) -> Embedding:
    """Words and positions of one side, "encoder" or "decoder"; `weight` [V, H] may be shared with
    others."""
    embedding = Embedding(
        *weight.shape,
        padding_idx,
        positions="learned" if getattr(args, f"{side}_learned_pos") else "sinusoidal",
        max_positions=args.max_source_positions if side == "encoder" else args.max_target_positions,
        dropout=float(args.dropout),
        scale=1.0 if args.no_scale_embedding else None,
        layer_norm=args.layernorm_embedding,
    )
    embedding.weight = weight
    return embedding


def final_norm(args: Any, side: str) -> nn.LayerNorm | None:
    """The LayerNorm after the last layer; pre-norm stacks have one."""
    if not getattr(args, f"{side}_normalize_before"):
        return None
    if side == "decoder" and safe_getattr(args, "no_decoder_final_norm", False):
        return None
    return nn.LayerNorm(getattr(args, f"{side}_embed_dim"))


def configs_of(
    config: LayerConfig, layers: int, side: str, *, memory: bool = False
) -> list[LayerConfig]:
    """Configurations of all layers of one side; `memory`: layers attend to encoder_out, too."""
    one = PackedSequences(rows=1, count=1)
    layer, sizes = (
        (programs.decoder_layer, (one, one)) if memory else (programs.encoder_layer, (one,))
    )
    build = partial(layer, config, *sizes)
    return [config_at(config, f"{side}.layers.{number}", build) for number in range(layers)]


class FairseqStack(Stack):
    """A Stack that says what fairseq asks of encoders and decoders."""

    def max_positions(self) -> int:
        """The longest sentence."""
        return self.embed_tokens.max_positions
