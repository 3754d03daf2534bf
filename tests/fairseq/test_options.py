"""The model's options: made from QuantConfig, checked, and nothing of fairseq's is ignored
silently."""

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest

from lsq.config import QuantConfig
from lsq.fairseq import options
from lsq.quant import WEIGHT_FORMATS

OTHER = {
    "mode": "float",
    "bits": 4,
    "weight_init": "absmax",
    "activation_init": "percentile",
    "weight_clip": 0.5,
    "activation_clip": 8.0,
    "clips": "learned",
    "percentile": 99.0,
    "calibration_passes": 16,
    "clip_step": 0.01,
    "weight_granularity": "tensor",
    "weight_format": [*WEIGHT_FORMATS][-1],
    "activation_format": "nvfp4",
    "gradient_format": "fp8-e5m2/row",
    "clip_gradient": "lsq",
    "backward": "float",
    "backward_dtype": "bfloat16",
    "sparsity": "2:4,every=8",
}
"""A value other than the default for every field."""


def test_every_field_is_an_option_with_help():
    parser = ArgumentParser()
    options.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    for field in fields(QuantConfig):
        assert options.option(options.PREFIX + field.name) in shown
        assert f"Default: {field.default}." in shown
    assert "--lsq-from CHECKPOINT" in shown


def test_every_option_reaches_the_configuration(parse):
    assert set(OTHER) == {field.name for field in fields(QuantConfig)}
    given = " ".join(f"--lsq-{name.replace('_', '-')} {value}" for name, value in OTHER.items())
    assert options.quantization(parse(given)) == QuantConfig(**OTHER)


def test_defaults_are_those_of_the_configuration(parse):
    args = parse()
    assert options.quantization(args) == QuantConfig()
    assert args.lsq_from is None


def test_value_that_is_not_allowed(parse):
    with pytest.raises(ValueError, match="bits is 9; it must be a whole number from 2 to 8"):
        options.quantization(parse("--lsq-bits 9"))
    with pytest.raises(
        ValueError, match="'median'; allowed: 'fixed', 'absmax', 'percentile', 'mse'"
    ):
        options.quantization(parse("--lsq-weight-init median"))


def test_layer_config_takes_each_side(parse):
    args = parse(
        "--encoder-attention-heads 2 --decoder-ffn-embed-dim 64 --decoder-normalize-before"
        " --activation-fn gelu "
        "--dropout 0.3 --attention-dropout 0.2 --relu-dropout 0.1 --lsq-bits 6"
    )
    encoder, decoder = options.layer_config(args, "encoder"), options.layer_config(args, "decoder")
    assert (encoder.hidden, encoder.heads, encoder.feed_forward, encoder.pre_norm) == (
        32,
        2,
        48,
        False,
    )
    assert (decoder.hidden, decoder.heads, decoder.feed_forward, decoder.pre_norm) == (
        32,
        4,
        64,
        True,
    )
    assert encoder.activation == "gelu" and encoder.quant.bits == 6
    assert (encoder.dropout, encoder.attention_dropout, encoder.activation_dropout) == (
        0.3,
        0.2,
        0.1,
    )
    assert (
        options.layer_config(parse("--activation-fn gelu_accurate"), "encoder").activation
        == "gelu_tanh"
    )


@pytest.mark.parametrize(
    "given",
    [
        "--encoder-layerdrop 0.1",
        "--decoder-layerdrop 0.1",
        "--encoder-layers-to-keep 0",
        "--decoder-layers-to-keep 0",
        "--adaptive-softmax-cutoff 4,8",
        "--adaptive-input",
        "--quant-noise-pq 0.1",
        "--quant-noise-scalar 0.1",
        "--cross-self-attention",
        "--no-cross-attention",
        "--checkpoint-activations",
        "--offload-activations",
        "--no-token-positional-embeddings",
        "--merge-src-tgt-embed",
        "--tie-adaptive-weights",
        "--base-layers 1",
        "--fp16",
        "--bf16",
        "--amp",
    ],
)
def test_unsupported_option_is_named(build, given):
    with pytest.raises(ValueError, match=f"does not support .*{given.split()[0]}"):
        build(given)


def test_unsupported_activation_is_named(build):
    with pytest.raises(ValueError, match="'tanh'; allowed: 'relu', 'gelu'"):
        build("--activation-fn tanh")


def test_two_widths_are_named(build):
    with pytest.raises(ValueError, match="--encoder-embed-dim 32, --decoder-embed-dim 64"):
        build("--decoder-embed-dim 64")


def test_width_that_is_not_divisible_by_heads(build):
    with pytest.raises(ValueError, match="hidden size 32 is not divisible by 3 heads"):
        build("--encoder-attention-heads 3")


def test_width_that_int8_products_cannot_take(build):
    with pytest.raises(ValueError, match="feed_forward is 50, but .* multiple of 16; use 64"):
        build("--encoder-ffn-embed-dim 50")


def test_unknown_option_is_refused(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--lsq-bit 8")
    assert "unrecognized arguments: --lsq-bit 8" in capsys.readouterr().err


def test_manual_lists_every_option_with_its_default():
    manual = (Path(__file__).parents[2] / "docs" / "fairseq.md").read_text(encoding="utf-8")
    for field in fields(QuantConfig):
        default = f"`{field.default}`" if field.default != "" else "–"
        assert f"| `{options.option(options.PREFIX + field.name)}` | {default} |" in manual
