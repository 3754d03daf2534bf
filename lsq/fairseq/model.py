"""The model: fairseq's transformer with lsq's layers."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq.distributed import utils as distributed
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModel, transformer_legacy
from omegaconf import DictConfig
from torch import Tensor, nn

from lsq.dist import replicas
from lsq.fairseq import checkpoint, options
from lsq.fairseq.stacks import LSQTransformerDecoder, LSQTransformerEncoder
from lsq.layers import Packing
from lsq.layers.model_formats import check_patterns
from lsq.layers.packing import packing_options

MODEL = "lsq_transformer"
PADDINGS = "lsq_paddings"
"""Key of a batch's Paddings."""


@dataclass(frozen=True)
class Paddings:
    """Masks bool [B, T] of a batch's tokens; True is padding. They stay on the CPU, so that nobody
    waits for a GPU to know the sizes of a batch; fairseq would move a dict."""

    src_tokens: Tensor
    prev_output_tokens: Tensor | None
    """None in a language model's batch."""


class LSQModel:
    """Base of lsq's models, before fairseq's class."""

    computes_loss = True
    """`forward` takes a target and returns the loss, for lsq_label_smoothed_cross_entropy."""
    task = "lsq_translation"
    """Default task of `lsq train`."""

    @classmethod
    def add_args(cls, parser) -> None:
        super().add_args(parser)
        options.add_arguments(parser)

    def started(self, args: Namespace) -> "LSQModel":
        """Load the checkpoint of --lsq-from, if any, and return this model. The option is then
        cleared in `args`, which fairseq writes into checkpoints. ValueError: the checkpoint does
        not fit, or a pattern of formats fits no tensor."""
        check_patterns(self, options.quantization(args))
        if args.lsq_from is not None:
            try:
                checkpoint.start_from(self, args.lsq_from, args)
            except (FileNotFoundError, IsADirectoryError, ValueError) as error:
                raise type(error)(f"--lsq-from {args.lsq_from}: {error}") from error
            args.lsq_from = None
        group = distributed.get_data_parallel_group()
        if distributed.get_world_size(group) > 1:
            replicas.share(self, group)  # average measured clips, whatever wraps the model
        return self

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg=None, args=None
    ):
        """Load a checkpoint of this model; see `checkpoint.check_fits`."""
        checkpoint.check_fits(self, state_dict)
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def prepare_for_inference_(self, cfg) -> None:
        """Prepare for fairseq's generation; ValueError if it wants attention weights or dropout."""
        for name in ("print_alignment", "retain_dropout"):
            value = getattr(cfg.generation, name, None)
            if value:
                raise ValueError(
                    f"lsq_transformer does not support {options.option(name)} ({value}); leave it"
                    " out"
                )
        super().prepare_for_inference_(cfg)

    def half(self):
        """Raise ValueError: the float parts compute in float32."""
        raise ValueError("lsq_transformer computes in int8 and float32; leave out --fp16")


@register_model(MODEL)
class LSQTransformerModel(LSQModel, TransformerModel):
    """A Transformer (Vaswani et al. 2017) in int8, with fairseq's options and interface."""

    @classmethod
    def build_model(cls, args: Namespace | DictConfig, task) -> "LSQTransformerModel":
        """Build from fairseq's options; ValueError if one, or --lsq-from, does not fit."""
        with options.as_namespace(args, cls) as args:
            transformer_legacy.base_architecture(args)
            options.set_defaults(args)
            options.check_supported(args)
            return super().build_model(args, task).started(args)

    @classmethod
    def build_encoder(
        cls, args: Any, src_dict, embed_tokens: nn.Embedding
    ) -> LSQTransformerEncoder:
        return LSQTransformerEncoder(args, src_dict, embed_tokens.weight)

    @classmethod
    def build_decoder(
        cls, args: Any, tgt_dict, embed_tokens: nn.Embedding
    ) -> LSQTransformerDecoder:
        return LSQTransformerDecoder(args, tgt_dict, embed_tokens.weight)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        prev_output_tokens: Tensor,
        return_all_hiddens: bool = False,
        target: Tensor | None = None,
        label_smoothing: float = 0.0,
        paddings: Paddings | None = None,
        **options,
    ) -> tuple:
        """Encode src_tokens int64 [B, S] and decode prev_output_tokens int64 [B, T].

        Without `target`: (logits float32 [B, T, V], extra outputs), as fairseq's transformer
        returns them; `options` are options of its decoder. With `target` int64 [B, T]: (loss,
        nll_loss, features float32 [M, H]) of `LSQDecoder.loss`, for the M words of
        prev_output_tokens that are not padding. Data parallel wrappers need the loss in `forward`.
        Without the `paddings` of the tokens it waits for a GPU.
        """
        run = partial(
            super().forward, src_tokens, src_lengths, prev_output_tokens, return_all_hiddens
        )
        if target is None:
            return run(**options)
        paddings = paddings or Paddings(
            src_tokens.eq(self.encoder.padding_idx), prev_output_tokens.eq(self.decoder.padding_idx)
        )
        options = packing_options(self)
        source, packing = (
            Packing(padding, **options)
            for padding in (paddings.src_tokens, paddings.prev_output_tokens)
        )
        # no name holds the encoder output: its memory is free after the decoder's last layer
        features = self.decoder.last_rows(
            prev_output_tokens, packing, self.encoder.last_rows(src_tokens, source), source
        )
        return self.decoder.loss(
            features, packing.pack(target, fill=self.decoder.padding_idx), label_smoothing
        )
