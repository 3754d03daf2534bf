"""Options of the model: --lsq-<field> for fields of QuantConfig; refusal of fairseq's options."""

import contextlib
import difflib
import logging
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lsq.config import LayerConfig, QuantConfig, documentation
from lsq.config.quantization import CONSTANT, RENAMED, of_this_version, of_trained
from lsq.fairseq import checkpoint
from lsq.fairseq.checkpoint import PREFIX

logger = logging.getLogger(__name__)


def option(name: str) -> str:
    """Spell a name of fairseq's namespaces as on the command line."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add --lsq-from, an option for every field of QuantConfig but `without`, and hidden options of
    version 0.1. They have no defaults: see `set_defaults`."""
    for name, value in CONSTANT.items():
        parser.add_argument(option(PREFIX + name), type=type(value), help=SUPPRESS)
    for name in RENAMED:
        parser.add_argument(option(PREFIX + name), help=SUPPRESS)
    parser.add_argument(
        "--lsq-from",
        metavar="CHECKPOINT",
        help="start from the weights of this float checkpoint, of fairseq's own transformer or"
        " lsq's; clips of weights are measured on them, clips of activations on the first batch",
    )
    texts = documentation(QuantConfig)
    for field in fields(QuantConfig):
        if field.name not in without:
            name, metavar = option(PREFIX + field.name), field.type.__name__.upper()
            help_text = f"{texts[field.name]} Default: {field.default}.".replace("%", "%%")
            parser.add_argument(name, type=field.type, metavar=metavar, help=help_text)


def set_defaults(args: Namespace) -> None:
    """Add the missing options of `add_arguments` to `args`. Their values are those of the
    checkpoint that a training resumes, else the defaults."""
    args.lsq_from = getattr(args, "lsq_from", None)
    given = checkpoint.quantizer_fields(vars(args))
    chosen = (of_trained if _of_checkpoint(given) else of_this_version)(given)
    missing = [field for field in fields(QuantConfig) if field.name not in chosen]
    before = checkpoint.trained_with(args) if missing else {}
    for field in missing:
        value = before.get(field.name)
        kept = type(value) is field.type and value != field.default
        chosen[field.name] = value if kept else field.default
        if kept:
            name = option(PREFIX + field.name)
            logger.info("%s is %s, as in the training that goes on here", name, value)
    for name in given:
        delattr(args, PREFIX + name)
    for name, value in chosen.items():
        setattr(args, PREFIX + name, value)


def _of_checkpoint(given: Collection[str]) -> bool:
    """Return whether fields of QuantConfig are a checkpoint's, which has all of its version."""
    names = {field.name for field in fields(QuantConfig)} - {"clips", "clip_init"}
    return names <= set(given)


NESTED = ("encoder", "decoder", "quant_noise")
"""Groups within the options of fairseq's transformer: encoder.embed_dim is --encoder-embed-dim."""
GROUPS = ("common", "checkpoint")
"""Further groups whose options a model reads."""


@contextlib.contextmanager
def as_namespace(given: Any, model: type, task: Any = None) -> Iterator[Any]:
    """Yield a model's options as a flat namespace of all groups and `task`, as in fairseq-train.

    fairseq-hydra-train has the model's options in a DictConfig. At the end all options are written
    into it, so that checkpoints have them, too. ValueError: the model's class lacks an option.
    """
    if not isinstance(given, DictConfig):
        yield given
        return
    root, nested = given._get_root(), OmegaConf.to_container(given, resolve=True)
    own = {name: value for name, value in nested.items() if not isinstance(value, dict)}
    for group in NESTED:
        own |= {f"{group}_{name}": value for name, value in (nested.get(group) or {}).items()}
    groups = [task] if root is given else [*map(root.get, GROUPS), task]
    around = {}
    for group in groups:
        around |= OmegaConf.to_container(group, resolve=True) if OmegaConf.is_config(group) else {}
    if not _of_checkpoint(checkpoint.quantizer_fields(own)):
        _check_known(own, model)
    args = Namespace(**{**around, **own})
    yield args
    with open_dict(given):
        for name in NESTED:
            given.pop(name, None)
        given.update(vars(args))


def _check_known(given: dict[str, Any], model: type) -> None:
    parser = ArgumentParser()
    model.add_args(parser)
    known = {"_name", "arch", *(action.dest for action in parser._actions)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (near is {near[0]})" if near else ""
            raise ValueError(
                f"model.{name} is no option of {given.get('_name')}{hint}; leave it out"
            )


def quantization(args: Any) -> QuantConfig:
    """Make the QuantConfig of the options; ValueError if a value is not allowed."""
    return QuantConfig(
        **{field.name: getattr(args, PREFIX + field.name) for field in fields(QuantConfig)}
    )


ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""fairseq's name of an activation -> LayerConfig's, where they differ."""


def layer_config(args: Any, side: str) -> LayerConfig:
    """Make the LayerConfig of a side; ValueError if layers cannot take an option."""
    return LayerConfig(
        hidden=getattr(args, f"{side}_embed_dim"),
        heads=getattr(args, f"{side}_attention_heads"),
        feed_forward=getattr(args, f"{side}_ffn_embed_dim"),
        dropout=float(args.dropout),
        attention_dropout=float(args.attention_dropout),
        activation_dropout=float(
            args.activation_dropout or getattr(args, "relu_dropout", 0.0) or 0.0
        ),
        activation=ACTIVATIONS.get(args.activation_fn, str(args.activation_fn)),
        pre_norm=getattr(args, f"{side}_normalize_before"),
        quant=quantization(args),
    )


UNSUPPORTED = """
    adaptive_input adaptive_softmax_cutoff amp base_layers bf16 char_inputs character_embeddings
    checkpoint_activations cross_self_attention decoder_layerdrop decoder_layers_to_keep
    decoder_xformers_att_config encoder_layerdrop encoder_layers_to_keep
    encoder_xformers_att_config export fp16 merge_src_tgt_embed no_cross_attention
    no_token_positional_embeddings offload_activations quant_noise_pq quant_noise_scalar
    quantization_config_path scale_attn scale_fc scale_heads scale_resids store_ema
    tie_adaptive_proj tie_adaptive_weights
""".split()
"""Options of fairseq that the layers have no counterpart for; all are off by default."""


def check_supported(args: Any) -> None:
    """Raise ValueError, which names all, for options of fairseq that this model would ignore."""
    given = [
        f"{option(name)} ({getattr(args, name)})"
        for name in UNSUPPORTED
        if getattr(args, name, None)
    ]
    if given:
        raise ValueError(
            f"lsq_transformer does not support {', '.join(given)}; drop the option or train with"
            " fairseq's own transformer"
        )
    names = ("encoder_embed_dim", "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")
    widths = {
        name: getattr(args, name) or args.decoder_embed_dim for name in names if hasattr(args, name)
    }
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{option(name)} {width}" for name, width in widths.items())
        raise ValueError(
            f"lsq_transformer has one width throughout, but was given {listed}; make them equal"
        )
