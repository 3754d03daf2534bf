"""The model's options: made from QuantConfig, checked, and nothing of fairseq's is ignored
silently."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields

import pytest

from lsq.config import QuantConfig
from lsq.config.quantization import CONSTANT
from lsq.fairseq import options
from lsq.quant import WEIGHT_FORMATS

OTHER = {
    "mode": "float",
    "bits": 4,
    "clip_init": "percentile",
    "clips": "learned",
    "weight_granularity": "tensor",
    "weight_format": [*WEIGHT_FORMATS][-1],
    "activation_format": "nvfp4",
    "gradient_format": "fp8-e5m2/row",
    "clip_gradient": "lsq",
    "backward": "float",
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
    assert options.quantization(parse()) == QuantConfig() and parse().lsq_from is None
    given = " ".join(f"--lsq-{name.replace('_', '-')} {value}" for name, value in OTHER.items())
    assert options.quantization(parse(given)) == QuantConfig(**OTHER)


def test_options_of_version_0_1(parse):
    """As users give them, one by one; and all of them, as a checkpoint holds them."""
    assert "--lsq-weight-init" not in ArgumentParser().format_help()
    with pytest.warns(FutureWarning, match="weight_init is clip_init now"):
        args = parse("--lsq-weight-init absmax --lsq-activation-init absmax")
    assert options.quantization(args) == QuantConfig(clip_init="absmax")
    assert not hasattr(args, "lsq_weight_init")
    with pytest.warns(FutureWarning, match="percentile is always 99.99 now"):
        assert options.quantization(parse("--lsq-percentile 99.99")) == QuantConfig()
    with pytest.raises(ValueError, match="clip_step is 0.01, but it is always 0.002 now: leave"):
        parse("--lsq-clip-step 0.01")
    before = {**vars(parse()), **{f"lsq_{name}": value for name, value in CONSTANT.items()}}
    del before["lsq_clip_init"]
    before |= {"lsq_weight_init": "mse", "lsq_activation_init": "mse"}
    args = Namespace(**before)
    options.set_defaults(args)
    assert options.quantization(args) == QuantConfig() and not hasattr(args, "lsq_clip_step")
    args = Namespace(**before | {"lsq_calibration_passes": 1, "lsq_activation_init": "fixed"})
    with pytest.warns(FutureWarning, match="calibration_passes was 1 in this training"):
        options.set_defaults(args)
    assert options.quantization(args) == QuantConfig(clips="learned")
    del before["lsq_clips"]
    args = Namespace(**before)
    options.set_defaults(args)
    assert options.quantization(args).clips == "learned"


def test_layer_config_takes_each_side(parse):
    args = parse(
        "--encoder-attention-heads 2 --decoder-ffn-embed-dim 64 --decoder-normalize-before"
        " --activation-fn gelu "
        "--dropout 0.3 --attention-dropout 0.2 --relu-dropout 0.1 --lsq-bits 6"
    )
    sides = [options.layer_config(args, side) for side in ("encoder", "decoder")]
    encoder, decoder = (
        (one.hidden, one.heads, one.feed_forward, one.pre_norm, one.activation, one.quant.bits)
        for one in sides
    )
    assert encoder == (32, 2, 48, False, "gelu", 6) and decoder == (32, 4, 64, True, "gelu", 6)
    one = sides[0]
    assert (one.dropout, one.attention_dropout, one.activation_dropout) == (0.3, 0.2, 0.1)
    other = options.layer_config(parse("--activation-fn gelu_accurate"), "encoder")
    assert other.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            (given, f"does not support .*{given.split()[0]}")
            for given in (
                "--encoder-layerdrop 0.1",
                "--decoder-layers-to-keep 0",
                "--adaptive-softmax-cutoff 4,8",
                "--quant-noise-pq 0.1",
                "--cross-self-attention",
                "--no-token-positional-embeddings",
                "--fp16",
            )
        ),
        ("--activation-fn tanh", "'tanh'; allowed: 'relu', 'gelu'"),
        ("--lsq-bits 9", "bits is 9; it must be a whole number from 2 to 8"),
        ("--decoder-embed-dim 64", "--encoder-embed-dim 32, --decoder-embed-dim 64"),
        ("--encoder-attention-heads 3", "hidden size 32 is not divisible by 3 heads"),
        ("--encoder-ffn-embed-dim 50", "feed_forward is 50, but .* multiple of 16; use 64"),
    ],
)
def test_what_the_model_does_not_do_is_named(build, given, message):
    with pytest.raises(ValueError, match=message):
        build(given)


@pytest.mark.parametrize("name", options.UNSUPPORTED)
def test_options_that_would_be_ignored_are_refused(parse, name):
    args = parse()
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"does not support {options.option(name)} \(True\)"):
        options.check_supported(args)
