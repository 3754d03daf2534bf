"""Options of the model: --lsq-<field> for every field of QuantConfig, and which options of fairseq are refused."""

import logging
from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

from lsq.config import LayerConfig, QuantConfig, documentation
from lsq.fairseq import checkpoint
from lsq.fairseq.checkpoint import PREFIX

logger = logging.getLogger(__name__)


def option(name: str) -> str:
    """The option on the command line of a name in fairseq's namespaces."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add --lsq-from and an option for every field of QuantConfig but `without`.

    No option has a default here: `set_defaults` fills in what was not given, so that architectures may have their own.
    """
    parser.add_argument(
        "--lsq-from",
        metavar="CHECKPOINT",
        help="start from the weights of this float checkpoint, of fairseq's own transformer or lsq's; clips of weights "
        "are measured on them, clips of activations on the first batch",
    )
    texts = documentation(QuantConfig)
    for field in fields(QuantConfig):
        if field.name not in without:
            name, metavar = option(PREFIX + field.name), field.type.__name__.upper()
            help_text = f"{texts[field.name]} Default: {field.default}.".replace("%", "%%")
            parser.add_argument(name, type=field.type, metavar=metavar, help=help_text)


def set_defaults(args: Namespace) -> None:
    """Give `args` every option of `add_arguments` that it lacks, in place.

    A training that goes on from a checkpoint keeps what it was trained with, unless other values are given.
    """
    args.lsq_from = getattr(args, "lsq_from", None)
    missing = [field for field in fields(QuantConfig) if not hasattr(args, PREFIX + field.name)]
    before = checkpoint.trained_with(args) if missing else {}
    for field in missing:
        name, value = PREFIX + field.name, before.get(PREFIX + field.name)
        kept = type(value) is field.type and value != field.default
        setattr(args, name, value if kept else field.default)
        if kept:
            logger.info("%s is %s, as in the training that goes on here", option(name), value)


def quantization(args: Any) -> QuantConfig:
    """The QuantConfig that the options ask for.

    Raises:
        ValueError: an option has a value that is not allowed.
    """
    return QuantConfig(**{field.name: getattr(args, PREFIX + field.name) for field in fields(QuantConfig)})


ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""What fairseq calls otherwise than LayerConfig."""


def layer_config(args: Any, side: str) -> LayerConfig:
    """The LayerConfig of one side, "encoder" or "decoder", from fairseq's options.

    Raises:
        ValueError: a size or an option that the layers cannot take.
    """
    return LayerConfig(
        hidden=getattr(args, f"{side}_embed_dim"),
        heads=getattr(args, f"{side}_attention_heads"),
        feed_forward=getattr(args, f"{side}_ffn_embed_dim"),
        dropout=float(args.dropout),
        attention_dropout=float(args.attention_dropout),
        activation_dropout=float(args.activation_dropout or getattr(args, "relu_dropout", 0.0) or 0.0),
        activation=ACTIVATIONS.get(args.activation_fn, str(args.activation_fn)),
        pre_norm=getattr(args, f"{side}_normalize_before"),
        quant=quantization(args),
    )


UNSUPPORTED = (
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "amp",
    "base_layers",
    "bf16",
    "char_inputs",
    "character_embeddings",
    "checkpoint_activations",
    "cross_self_attention",
    "decoder_layerdrop",
    "decoder_layers_to_keep",
    "decoder_xformers_att_config",
    "encoder_layerdrop",
    "encoder_layers_to_keep",
    "encoder_xformers_att_config",
    "export",
    "fp16",
    "merge_src_tgt_embed",
    "no_cross_attention",
    "no_token_positional_embeddings",
    "offload_activations",
    "quant_noise_pq",
    "quant_noise_scalar",
    "quantization_config_path",
    "scale_attn",
    "scale_fc",
    "scale_heads",
    "scale_resids",
    "store_ema",
    "tie_adaptive_proj",
    "tie_adaptive_weights",
)
"""Options of fairseq that the layers have no counterpart for; all are off by default."""


def check_supported(args: Any) -> None:
    """Refuse options of fairseq that this model would otherwise ignore.

    Raises:
        ValueError: names every such option that is on, with its value.
    """
    given = [f"{option(name)} ({getattr(args, name)})" for name in UNSUPPORTED if getattr(args, name, None)]
    if given:
        raise ValueError(
            f"lsq_transformer does not support {', '.join(given)}; drop the option or train with "
            "fairseq's own transformer"
        )
    names = ("encoder_embed_dim", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")
    widths = {name: getattr(args, name) or args.decoder_embed_dim for name in names if hasattr(args, name)}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{option(name)} {width}" for name, width in widths.items())
        raise ValueError(f"lsq_transformer has one width throughout, but was given {listed}; make them equal")
