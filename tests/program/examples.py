"""Programs of every kind of layer, small, by name; "lsq" and "float" in a name say what they are."""

from lsq.config import LayerConfig, QuantConfig
from lsq.program import layers
from tests.layers.shapes import config_of

VARIANTS = {
    "": {},
    " lsq": {"clip_gradient": "lsq"},
    " int8 backward": {"backward": "int8"},
    " pre-norm": {"pre_norm": True, "dropout": 0.1},
    " float": {"mode": "float"},
}


def _programs():
    for suffix, options in VARIANTS.items():
        config = config_of(**options)
        quant = config.quant
        rows = 91 if "float" in suffix else 96
        yield "linear" + suffix, lambda q=quant: layers.linear(q, 21, 48, 32, True, True, True)
        yield "self-attention" + suffix, lambda c=config: layers.self_attention(c, 3, 7, True, True, True, True)
        yield "cross-attention" + suffix, lambda c=config: layers.cross_attention(c, 3, 7, 9, True, True, True)
        yield "feed-forward" + suffix, lambda c=config: layers.feed_forward(c, 21, True, True)
        yield "encoder" + suffix, lambda c=config: layers.encoder_layer(c, 3, 7, True, True, True)
        yield "decoder" + suffix, lambda c=config: layers.decoder_layer(c, 3, 7, 9, True, True, True, True)
        yield "decoder without backward" + suffix, lambda c=config: layers.decoder_layer(
            c, 3, 7, 9, True, True, False, False
        )
        yield "memory" + suffix, lambda c=config: layers.decoder_memory(c, 3, 9)
        yield "step" + suffix, lambda c=config: layers.decoder_step(c, 3, 4, 9, True)
        yield "logits" + suffix, lambda q=quant, r=rows: layers.vocabulary_logits(q, 21, 48, 91, r, True, True)
        yield "loss" + suffix, lambda q=quant, r=rows: layers.vocabulary_loss(q, 21, 48, 91, r, 1, 0.1, True, True)
    yield "embedding float", lambda: layers.embedding(
        QuantConfig(mode="float"), 3, 7, 13, 48, 20, 1, 7.0, 0.1, True, True, True
    )
    wide = LayerConfig(hidden=512, heads=8, feed_forward=2048, dropout=0.1, quant=QuantConfig(backward="int8"))
    yield "wide encoder", lambda: layers.encoder_layer(wide, 16, 32, False, True, True)


PROGRAMS = dict(_programs())
