"""Transformer layers and their parts against the float64 reference; how gradients are rounded, what
passes through them, and what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fairseq.modules import MultiheadAttention as FairseqAttention

from lsq.config import ACTIVATIONS
from lsq.layers import (
    Embedding,
    FeedForward,
    MultiheadAttention,
    Packing,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    VocabularyProjection,
    programs,
)
from tests.layers.oracle import compare_with_reference, prepare
from tests.layers.shapes import (
    ATTENTIONS,
    HEADS,
    HIDDEN,
    assert_unbiased,
    config_of,
    decibels,
    gradients,
    padding_mask,
)

TIME, SOURCE, BATCH = 7, 9, 3
KINDS = {
    "encoder": TransformerEncoderLayer,
    "decoder": TransformerDecoderLayer,
    "self-attention": MultiheadAttention,
    "cross-attention": partial(MultiheadAttention, cross=True),
    "feed-forward": FeedForward,
}
WITH_MEMORY = ("decoder", "cross-attention")
SIZES = TIME, SOURCE, BATCH


def draw(kind, sizes=SIZES):
    """Random inputs of a module."""
    time, source, batch = sizes
    x = torch.randn(time, batch, HIDDEN)
    return (x, torch.randn(source, batch, HIDDEN)) if kind in WITH_MEMORY else (x,)


def turned(x):
    return x.transpose(0, 1)


def compare(kind, config, *, sizes=SIZES, padded=False, causal=False, own=None, plain=None):
    """Compare a module with the reference, of the configuration `plain` in eval mode, if given.

    `padded`: the input, or the memory, has padding. `own`: mask of a decoder's input.
    """
    time, source, batch = sizes
    mask = padding_mask(batch, source if kind in WITH_MEMORY else time) if padded else None
    run, reference = {
        "encoder": (
            lambda layer, x: layer(x, mask),
            lambda layer, x: layer.encoder_layer(x, mask, causal),
        ),
        "decoder": (
            lambda layer, x, memory: layer(x, memory, mask, self_padding_mask=own),
            lambda layer, x, memory: layer.decoder_layer(x, memory, mask, own),
        ),
        "self-attention": (
            lambda layer, x: layer(x, key_padding_mask=mask, causal=causal),
            lambda layer, x: turned(layer.self_attention(turned(x), "", mask, causal)),
        ),
        "cross-attention": (
            lambda layer, x, memory: layer(x, memory, mask),
            lambda layer, x, memory: turned(
                layer.cross_attention(turned(x), turned(memory), "", mask)
            ),
        ),
        "feed-forward": (
            lambda layer, x: layer(x),
            lambda layer, x: layer.feed_forward(x.reshape(1, -1, HIDDEN), "").view(x.shape),
        ),
    }[kind]
    options = {"causal": causal} if kind == "encoder" else {}
    masks = {"memory_padding": mask, "padding": own}
    if kind not in WITH_MEMORY:
        masks = {"padding": None if kind == "feed-forward" else mask}
    module = KINDS[kind](config, **options).train(plain is None)
    outcome = compare_with_reference(
        module, plain or config, run, reference, lambda: draw(kind, sizes), **masks
    )
    bits = config.quant.bits
    if bits < 8:
        assert max(int(one.abs().max()) for one in outcome.codes.values()) == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "pre_norm, norm, activation",
    [
        (False, "layer", "relu"),
        (True, "layer", "gelu"),
        (False, "rms", "gelu"),
        (True, "rms", "relu"),
    ],
)
def test_modules_equal_the_reference(
    kind, clip_gradient, padded, dropout, pre_norm, norm, activation
):
    options = {"pre_norm": pre_norm, "norm": norm, "activation": activation}
    compare(kind, config_of(dropout=dropout, clip_gradient=clip_gradient, **options), padded=padded)


LSQ = {"clip_gradient": "lsq", "activation": "gelu"}
GATED = {"activation": "silu", "gated": True, "bias": False}
CASES = [
    *(
        (kind, {"bits": bits, "weight_granularity": granularity, **LSQ}, {})
        for kind, widths in {"encoder": (2, 4, 7), "decoder": (3, 4)}.items()
        for bits in widths
        for granularity in ("tensor", "channel")
    ),
    *(
        (kind, {"bits": 4, "weight_granularity": "tensor", "dropout": 0.1}, {"padded": True})
        for kind in ("self-attention", "cross-attention", "feed-forward")
    ),
    *(
        (kind, {"dropout": 0.1}, {"sizes": sizes, "padded": min(sizes) > 1})
        for kind in KINDS
        for sizes in ((1, 1, 1), (1, 5, 3), (13, 1, 1), (11, 17, 2))
    ),
    ("feed-forward", {}, {"sizes": (341, 1, 1)}),
    *(("encoder", {"heads": heads, "pre_norm": True}, {}) for heads in (1, 6)),
    *(
        ("encoder", {**GATED, "pre_norm": True, "norm": norm, "dropout": 0.1}, {"padded": True})
        for norm in ("layer", "rms")
    ),
    *(
        ("feed-forward", {"activation": activation, "gated": gated, **options}, {})
        for activation in ACTIVATIONS
        for gated in (False, True)
        for options in (
            {"clip_gradient": "pact", "bias": False},
            {"clip_gradient": "lsq", "dropout": 0.2},
            {"clip_gradient": "lsq", "bits": 4, "bias": False},
            {"mode": "float"},
            {"mode": "float", "bias": False},
        )
    ),
    *(
        (
            "encoder",
            {"attention": attention, "norm": "rms", "pre_norm": True, "dropout": 0.2},
            # the reference computes padding: it must see a word
            {"causal": True, "padded": "window" not in attention},
        )
        for attention in ATTENTIONS.values()
    ),
    ("encoder", {"attention": ATTENTIONS["biases"]}, {"padded": True}),
    *(
        ("decoder", {"attention": ATTENTIONS[name], "clip_gradient": "lsq"}, {})
        for name in ("grouped", "all")
    ),
    ("self-attention", {"dropout": 0.2}, {"causal": True, "padded": True}),
    ("decoder", {"dropout": 0.1}, {"padded": True, "own": padding_mask(BATCH, TIME)}),
    *(
        (kind, {"mode": "float", "pre_norm": pre_norm, "norm": norm, "dropout": 0.2}, {})
        for kind in ("encoder", "decoder")
        for pre_norm in (False, True)
        for norm in ("layer", "rms")
    ),
    *((kind, {"mode": "float"}, {"padded": True}) for kind in KINDS),
    # in eval mode nothing is dropped
    ("encoder", {"dropout": 0.5}, {"padded": True, "plain": config_of()}),
]


@pytest.mark.parametrize("kind, options, how", CASES)
def test_special_modules_equal_the_reference(kind, options, how):
    compare(kind, config_of(**options), **how)


def test_attention_begins_as_fairseqs():
    ours, theirs = MultiheadAttention(config_of()), FairseqAttention(HIDDEN, HEADS)
    qkv = torch.cat([one.weight for one in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])
    for one, other in ((ours.qkv_weight, qkv), (ours.out_weight, theirs.out_proj.weight)):
        assert 0.9 < one.std() / other.std() < 1.1
    assert not ours.out_bias.any()


# What passes through


@torch.no_grad()
def test_padding_and_the_future_change_nothing():
    layer, mask = TransformerEncoderLayer(config_of()).eval(), padding_mask(BATCH, TIME)
    (x,) = draw("encoder")
    found = layer(x, mask)
    other = torch.where(mask.t()[..., None], torch.randn_like(x), x)
    assert torch.equal(found, layer(other, mask)) and not found[mask.t()].any()
    attention, none = MultiheadAttention(config_of()), torch.zeros(BATCH, TIME, dtype=torch.bool)
    assert torch.equal(attention(x), attention(x, key_padding_mask=none))
    decoder = TransformerDecoderLayer(config_of()).eval()
    x, memory = draw("decoder")
    before = decoder(x, memory)
    other = x.clone()
    other[4:] = torch.randn(3, BATCH, HIDDEN)
    after = decoder(other, memory)
    assert torch.equal(before[:4], after[:4]) and not torch.equal(before[4:], after[4:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_what_is_not_finite_reaches_the_output(mode, value):
    """The code of infinity is clipped, but the residual carries it."""
    for kind in ("encoder", "decoder"):
        layer = KINDS[kind](config_of(mode=mode))
        layer(*draw(kind))
        inputs = draw(kind)
        inputs[-1][3, 1, 2] = value
        found = layer(*inputs)
        if value != value:
            assert found[:, 1].isnan().all()
        elif kind == "encoder":
            assert not found[3, 1].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_overflow_in_the_gradient_reaches_the_gradients(value, backward, mode):
    layer = TransformerEncoderLayer(config_of(mode=mode, backward=backward))
    x = torch.randn(7, 3, HIDDEN, requires_grad=True)
    output = layer(x)
    upstream = torch.randn_like(output)
    upstream[2, 1, 3] = value
    found = torch.autograd.grad(output, [x, *layer.parameters()], upstream)
    named = dict(zip(["x", *dict(layer.named_parameters())], found, strict=True))
    for name in ("x", "self_attn.qkv_weight", "feed_forward.fc1_weight", "final_layer_norm.bias"):
        assert not named[name].isfinite().all(), name


# Gradients


@pytest.mark.parametrize(
    "kind, options, count, exempt",
    [
        (
            "encoder",
            {"activation": "gelu"},
            200,
            ("feed_forward.fc2_bias", "final_layer_norm.weight", "final_layer_norm.bias"),
        ),
        ("encoder", {"activation": "gelu", "pre_norm": True}, 200, ("feed_forward.fc2_bias",)),
        ("feed-forward", GATED, 60, ()),
    ],
)
def test_int8_gradients_are_unbiased(kind, options, count, exempt):
    x = torch.randn(5, 3, HIDDEN, requires_grad=True)
    exact, rounded = (
        KINDS[kind](config_of(backward=backward, **options)) for backward in ("float", "int8")
    )
    prepare(exact, lambda layer, x: layer(x), (x,))
    rounded.load_state_dict(exact.state_dict())
    drawn = [gradients(rounded, rounded(x), x) for _ in range(count)]
    assert_unbiased(gradients(exact, exact(x), x), drawn, exempt=exempt)


QKV = "self_attn.qkv_weight"


@pytest.mark.parametrize(
    "kind, options, names, least",
    [
        ("encoder", {}, (QKV, "self_attn.out_weight", "feed_forward.fc1_weight"), 32),
        ("decoder", {}, ("input 1", QKV, "encoder_attn.key_value_weight"), 30),
        ("self-attention", {}, ("qkv_weight", "qkv_bias", "out_weight"), 30),
        (
            "encoder",
            {"attention": ATTENTIONS["all"]},
            (QKV, "self_attn.qkv_bias", "self_attn.query_norm.weight"),
            30,
        ),
    ],
)
def test_int8_gradients_have_little_noise(kind, options, names, least):
    inputs, found = draw(kind, (13, SOURCE, 5)), []
    causal = {"causal": True} if options else {}
    for one in inputs:
        one.requires_grad_()
    for backward in ("float", "int8"):
        torch.manual_seed(3)
        layer = KINDS[kind](config_of(backward=backward, **options), **causal)
        found.append(gradients(layer, layer(*inputs), *inputs))
    exact, rounded = found
    for name in ("input 0", *names):
        assert decibels(exact[name], rounded[name]) > least, name


def test_backward_twice():
    layer = TransformerEncoderLayer(config_of(dropout=0.2, backward="int8"))
    x = torch.randn(5, 3, HIDDEN, requires_grad=True)
    total = layer(x).square().sum()
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(map(torch.equal, first, second))


def test_gradients_that_nobody_needs():
    layer = TransformerEncoderLayer(config_of())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.endswith("_clip"))
    (x,) = draw("encoder")
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == name.endswith("_clip"), name
    found = layer.eval()(x)
    with torch.no_grad():
        assert torch.equal(layer(x), found)


def test_the_memory_alone_needs_a_gradient():
    """As that of an encoder that is trained before a decoder that is not."""
    layer = TransformerDecoderLayer(config_of())
    x, memory = torch.randn(TIME, HIDDEN), torch.randn(SOURCE, HIDDEN, requires_grad=True)
    target, source = Packing(shape=(1, TIME)), Packing(shape=(1, SOURCE))
    inputs = {"x": x, "cu_seqlens": target.cu_seqlens, "memory": memory}
    inputs["memory_cu_seqlens"] = source.cu_seqlens
    layer.rows(x, target, memory, source)  # measures the clips
    found = []
    for wanted in (None, frozenset({"memory"})):
        mode = replace(layer.mode(x, memory), wanted=wanted)
        program = programs.decoder_layer(layer.config, target.sentences, source.sentences, mode)
        (y,) = layer.execute(program, inputs)
        found.append(torch.autograd.grad(y.square().sum(), memory)[0])
    assert torch.equal(*found) and found[0].norm() > 0


# Refusals


def empty_calls(config) -> dict:
    """Every module on a batch without sentences."""
    x, memory = torch.zeros(5, 0, HIDDEN, requires_grad=True), torch.zeros(7, 0, HIDDEN)
    projection = VocabularyProjection(40, HIDDEN, quant=config.quant)
    nothing = torch.zeros(5, 0, dtype=torch.int64)
    calls = {
        kind: lambda kind=kind: KINDS[kind](config)(x, *(memory,) * (kind in WITH_MEMORY))
        for kind in KINDS
    }
    return calls | {
        "padded": lambda: TransformerEncoderLayer(config)(x, nothing.t().bool()),
        "logits": lambda: projection(x),
        "loss": lambda: projection.loss(x, nothing),
        "no targets": lambda: projection.loss(torch.zeros(5, 2, HIDDEN), nothing),
        "embedding": lambda: Embedding(40, HIDDEN, 1)(nothing.t()),
    }


@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("name", empty_calls(config_of()))
def test_a_batch_without_sentences_is_refused(mode, name):
    with pytest.raises(ValueError, match=r"(is|are) \(.*\b0\b.*\); (it|they) must be"):
        empty_calls(config_of(mode=mode))[name]()


@pytest.mark.parametrize("shape", [(), (HIDDEN,), (5, HIDDEN), (5, 2, HIDDEN + 1), (0, 2, HIDDEN)])
def test_layers_name_the_shape_that_they_take(shape):
    for module in (TransformerEncoderLayer, MultiheadAttention):
        with pytest.raises(
            ValueError, match=rf"it must be \[time, sentences, {HIDDEN}\] with at least one word"
        ):
            module(config_of())(torch.zeros(shape))


def test_wrong_inputs_are_named():
    layer, (x, memory) = TransformerEncoderLayer(config_of()), draw("decoder")
    for call, message in (
        (lambda: layer(x, torch.ones(7, 3, dtype=torch.bool)), r"mask is \(7, 3\).*\(3, 7\)"),
        (lambda: layer(torch.randn(7, 3, 64)), "64.*48"),
        (lambda: layer(x.double()), "x is torch.float64"),
        # two rows of half the width would give a result of the right shape
        (lambda: FeedForward(config_of())(torch.randn(5, 2 * HIDDEN)), "96.*48"),
        (lambda: FeedForward(config_of())(torch.zeros(())), "the input is"),
        (lambda: TransformerDecoderLayer(config_of())(x, memory[:, :2]), "memory"),
        (
            lambda: MultiheadAttention(config_of(), cross=True)(x),
            "cross is True, but a memory was not given",
        ),
        (
            lambda: MultiheadAttention(config_of())(x, x),
            "cross is False, but a memory was given",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
