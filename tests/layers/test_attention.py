"""MultiheadAttention against the float64 reference and against fairseq's."""

import pytest
import torch
from fairseq.modules import MultiheadAttention as FairseqAttention

from lsq.layers import MultiheadAttention
from tests.layers.oracle import compare_with_reference
from tests.layers.shapes import HEADS, HIDDEN, config_of, gradients, padding_mask

TIME, SOURCE, BATCH = 7, 9, 3


def check_self(config, *, time=TIME, batch=BATCH, causal=False, padded=False):
    mask = padding_mask(batch, time) if padded else None

    def reference(layer, x):
        return layer.self_attention(x.transpose(0, 1), "", mask, causal).transpose(0, 1)

    return compare_with_reference(
        MultiheadAttention(config),
        config,
        lambda layer, x: layer(x, key_padding_mask=mask, causal=causal),
        reference,
        lambda: (torch.randn(time, batch, HIDDEN),),
        padding=mask,
    )


def check_cross(config, *, time=TIME, source=SOURCE, batch=BATCH, padded=False):
    mask = padding_mask(batch, source) if padded else None

    def reference(layer, x, memory):
        return layer.cross_attention(x.transpose(0, 1), memory.transpose(0, 1), "", mask).transpose(
            0, 1
        )

    return compare_with_reference(
        MultiheadAttention(config, cross=True),
        config,
        lambda layer, x, memory: layer(x, memory, mask),
        reference,
        lambda: (torch.randn(time, batch, HIDDEN), torch.randn(source, batch, HIDDEN)),
        memory_padding=mask,
    )


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_self_attention_equals_the_reference(clip_gradient, causal, padded, dropout):
    check_self(
        config_of(dropout=dropout, clip_gradient=clip_gradient), causal=causal, padded=padded
    )


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cross_attention_equals_the_reference(clip_gradient, padded, dropout):
    check_cross(config_of(dropout=dropout, clip_gradient=clip_gradient), padded=padded)


def test_narrow_integers_equal_the_reference():
    config = config_of(bits=4, weight_granularity="tensor", dropout=0.1)
    check_self(config, causal=True)
    check_cross(config, padded=True)


@pytest.mark.parametrize("time, source, batch", [(1, 1, 1), (1, 41, 1), (41, 1, 3)])
def test_odd_shapes(time, source, batch):
    check_cross(config_of(), time=time, source=source, batch=batch)
    check_self(config_of(), time=time, batch=batch, causal=True)


def fairseq_attention(cross):
    """fairseq's module, and the same weights for ours."""
    width = {"kdim": HIDDEN, "vdim": HIDDEN} if cross else {}
    theirs = FairseqAttention(
        HIDDEN, HEADS, encoder_decoder_attention=cross, self_attention=not cross, **width
    )
    parts = {"out": [theirs.out_proj]}
    if cross:
        parts |= {"query": [theirs.q_proj], "key_value": [theirs.k_proj, theirs.v_proj]}
    else:
        parts |= {"qkv": [theirs.q_proj, theirs.k_proj, theirs.v_proj]}
    state = {}
    for name, modules in parts.items():
        for kind in ("weight", "bias"):
            state[f"{name}_{kind}"] = torch.cat(
                [getattr(module, kind) for module in modules]
            ).detach()
    return theirs, state


@pytest.mark.parametrize("cross", [False, True])
def test_float_mode_equals_fairseq(cross):
    theirs, state = fairseq_attention(cross)
    ours = MultiheadAttention(config_of(mode="float"), cross=cross)
    ours.load_state_dict(state)
    x = torch.randn(TIME, BATCH, HIDDEN, requires_grad=True)
    memory = torch.randn(SOURCE, BATCH, HIDDEN, requires_grad=True) if cross else x
    mask = padding_mask(BATCH, len(memory))
    expected, _ = theirs(x, memory, memory, key_padding_mask=mask, need_weights=False)
    if not cross:
        expected = expected.masked_fill(mask.t()[..., None], 0.0)  # where x is padding
    found = ours(x, memory if cross else None, mask)
    assert (found - expected).abs().max() < 2e-6
    inputs = (x, memory) if cross else (x,)
    upstream = torch.randn_like(expected)
    ours_gradients = torch.autograd.grad(found, inputs, upstream)
    for gradient, wanted in zip(
        ours_gradients, torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert (gradient - wanted).abs().max() < 5e-6


def test_initial_weights_have_fairseqs_spread():
    theirs, _ = fairseq_attention(False)
    ours = MultiheadAttention(config_of())
    for part, module in zip(
        ours.qkv_weight.chunk(3), (theirs.q_proj, theirs.k_proj, theirs.v_proj), strict=True
    ):
        assert 0.9 < part.std() / module.weight.std() < 1.1
    assert 0.9 < ours.out_weight.std() / theirs.out_proj.weight.std() < 1.1
    assert not ours.out_bias.any()


def test_a_mask_that_masks_nothing_changes_nothing():
    layer = MultiheadAttention(config_of())
    x = torch.randn(TIME, BATCH, HIDDEN)
    assert torch.equal(
        layer(x), layer(x, key_padding_mask=torch.zeros(BATCH, TIME, dtype=torch.bool))
    )


def test_int8_gradients_of_self_attention_are_close():
    found = []
    for backward in ("float", "int8"):
        torch.manual_seed(2)
        layer = MultiheadAttention(config_of(backward=backward))
        x = torch.randn(TIME, BATCH, HIDDEN, requires_grad=True)
        found.append(gradients(layer, layer(x), x))
    exact, rounded = found
    for name in ("input 0", "qkv_weight", "qkv_bias", "out_weight"):
        assert (rounded[name] - exact[name]).norm() < 0.03 * exact[name].norm(), name


def test_a_memory_must_be_wanted():
    x = torch.randn(TIME, BATCH, HIDDEN)
    with pytest.raises(ValueError, match="cross is True, but a memory was not given"):
        MultiheadAttention(config_of(), cross=True)(x)
    with pytest.raises(ValueError, match="cross is False, but a memory was given"):
        MultiheadAttention(config_of())(x, x)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="48 is not divisible by 5 heads"):
        config_of(heads=5)
