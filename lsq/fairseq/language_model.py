"""fairseq's transformer_lm with lsq's layers: model, architectures, task."""

from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel, register_model, transformer_lm
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from omegaconf import DictConfig
from torch import Tensor, nn

from lsq.fairseq import architectures, options
from lsq.fairseq.memory import bounding_batch
from lsq.fairseq.model import LSQModel, Paddings
from lsq.fairseq.stacks import LSQDecoder, layer_configs
from lsq.fairseq.task import LSQTask, TaskOptions
from lsq.layers import Packing, TransformerEncoderLayer
from lsq.layers.packing import packing_options

MODEL, TASK = "lsq_transformer_lm", "lsq_language_modeling"
SUFFIXES = """
    _big _gpt _gpt2_tiny _gpt2_small _gpt2_medium _gpt2_big _gpt2_big_wide _gpt2_bigger
    _gpt3_small _gpt3_medium _gpt3_large _gpt3_xl _gpt3_2_7 _gpt3_6_7 _gpt3_13
""".split()
"""fairseq's transformer_lm<suffix> is lsq_transformer_lm<suffix> here."""


@register_model(MODEL)
class LSQTransformerLanguageModel(LSQModel, FairseqLanguageModel):
    """A Transformer language model with fairseq's options and interface."""

    task = TASK

    @classmethod
    def add_args(cls, parser) -> None:
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        super().add_args(parser)

    @classmethod
    def build_model(cls, args: Namespace | DictConfig, task) -> "LSQTransformerLanguageModel":
        """Build from fairseq's options; ValueError if one is not supported, the task is a
        translation, or the checkpoint of --lsq-from does not fit."""
        if isinstance(task, TranslationTask):
            raise ValueError(
                f"{MODEL} is a language model and does not translate; train it with --task {TASK}"
            )
        with options.as_namespace(args, cls, getattr(task, "cfg", None)) as args:
            base_architecture(args)
            options.set_defaults(args)
            options.check_supported(args)
            if args.max_target_positions is None:
                args.max_target_positions = args.tokens_per_sample + args.add_bos_token
            words = task.source_dictionary
            weight = transformer_lm.Embedding(
                len(words), args.decoder_embed_dim, words.pad()
            ).weight
            configs = layer_configs(args, "decoder")
            layers = (TransformerEncoderLayer(config, causal=True) for config in configs)
            return cls(LSQDecoder(args, task.target_dictionary, weight, layers)).started(args)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        target: Tensor | None = None,
        label_smoothing: float = 0.0,
        paddings: Paddings | None = None,
        **extra,
    ) -> tuple:
        """Predict the words after each of src_tokens int64 [B, T].

        Without `target`: (logits float32 [B, T, V], extra outputs); `extra` are options of the
        decoder. With `target` int64 [B, T]: (loss, nll_loss, features) of `LSQDecoder.loss`.
        Without the `paddings` of the tokens it waits for a GPU.
        """
        if target is None:
            return self.decoder(src_tokens, **extra)
        padding = (
            src_tokens.eq(self.decoder.padding_idx) if paddings is None else paddings.src_tokens
        )
        packing = Packing(padding, **packing_options(self))
        features = self.decoder.last_rows(src_tokens, packing)
        return self.decoder.loss(
            features, packing.pack(target, fill=self.decoder.padding_idx), label_smoothing
        )


def base_architecture(args: Namespace) -> None:
    """Fill in the defaults of transformer_lm, but with the layers' width everywhere."""
    args.decoder_embed_dim = getattr(
        args, "decoder_embed_dim", TransformerLanguageModelConfig.decoder_embed_dim
    )
    widths = dict.fromkeys(("decoder_input_dim", "decoder_output_dim"), args.decoder_embed_dim)
    for field in fields(TransformerLanguageModelConfig):
        of_task = isinstance(field.default, str) and field.default.startswith("${")
        if not (of_task or field.name.startswith("_") or hasattr(args, field.name)):
            setattr(args, field.name, widths.get(field.name, field.default))


architectures.register(MODEL, MODEL, base_architecture)
for _suffix in SUFFIXES:
    architectures.register(
        MODEL, MODEL + _suffix, getattr(transformer_lm, "transformer_lm" + _suffix)
    )


@dataclass
class LSQLanguageModelingConfig(LanguageModelingConfig, TaskOptions):
    """The options of language modelling."""


@register_task(TASK, dataclass=LSQLanguageModelingConfig)
class LSQLanguageModelingTask(LSQTask, LanguageModelingTask):
    """fairseq's language_modeling as a task of lsq."""

    def build_model(self, args: Any, from_checkpoint: bool = False) -> nn.Module:
        """Build the model of these options; ValueError if it is no language model."""
        name = getattr(args, "_name", None) or args.arch
        if not issubclass(ARCH_MODEL_REGISTRY[name], FairseqLanguageModel):
            raise ValueError(
                f"--task {TASK} trains language models, and {name} is none; use --arch {MODEL}"
            )
        return super().build_model(args, from_checkpoint)

    def bounding_batch(self, model: FairseqLanguageModel) -> dict[str, Any]:
        tokens, sentences = self.cfg.max_tokens, self.cfg.batch_size
        if tokens and self.cfg.add_bos_token:  # fairseq does not count this word
            tokens += min(tokens, sentences or tokens)
        batch = bounding_batch(
            self.source_dictionary,
            max_tokens=tokens,
            max_sentences=sentences,
            max_positions=(model.max_positions(), model.max_positions()),
        )
        del batch["net_input"]["prev_output_tokens"]
        return batch
