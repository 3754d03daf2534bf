"""TransformerDecoderLayer against the float64 reference, fairseq's own layer, and itself one step
at a time."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from lsq.layers import TransformerDecoderLayer, programs
from lsq.layers.decoding import reorder
from lsq.layers.packing import Packing
from tests.layers.fairseq_layers import compare_with_fairseq, fairseq_layer
from tests.layers.oracle import assert_same_codes, compare_with_reference, recorded
from tests.layers.shapes import HIDDEN, config_of, decibels, gradients, padding_mask

TIME, SOURCE, BATCH = 7, 9, 3


def draw(time=TIME, source=SOURCE, batch=BATCH):
    return torch.randn(time, batch, HIDDEN), torch.randn(source, batch, HIDDEN)


def check(config, *, batch=BATCH, time=TIME, source=SOURCE, padded=False):
    mask = padding_mask(batch, source) if padded else None
    return compare_with_reference(
        TransformerDecoderLayer(config),
        config,
        lambda layer, x, memory: layer(x, memory, mask),
        lambda reference, x, memory: reference.decoder_layer(x, memory, mask),
        lambda: draw(time, source, batch),
        memory_padding=mask,
    )


def test_the_memory_alone_needs_a_gradient():
    """As that of an encoder that is trained before a decoder that is not."""
    layer = TransformerDecoderLayer(config_of())
    x, memory = torch.randn(TIME, HIDDEN), torch.randn(SOURCE, HIDDEN, requires_grad=True)
    target, source = Packing(shape=(1, TIME)), Packing(shape=(1, SOURCE))
    inputs = {
        "x": x,
        "cu_seqlens": target.cu_seqlens,
        "memory": memory,
        "memory_cu_seqlens": source.cu_seqlens,
    }
    layer.rows(x, target, memory, source)  # measures the clips
    found = []
    for wanted in (None, frozenset({"memory"})):
        mode = replace(layer.mode(x, memory), wanted=wanted)
        program = programs.decoder_layer(layer.config, target.sentences, source.sentences, mode)
        (y,) = layer.execute(program, inputs)
        found.append(torch.autograd.grad(y.square().sum(), memory)[0])
    assert torch.equal(*found)
    assert found[0].norm() > 0


@pytest.mark.parametrize("clip_gradient", ["pact", "lsq"])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_the_reference(clip_gradient, pre_norm, activation):
    for dropout, padded in product((0.0, 0.2), (False, True)):
        config = config_of(
            dropout=dropout, pre_norm=pre_norm, activation=activation, clip_gradient=clip_gradient
        )
        check(config, padded=padded)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_narrow_integers_equal_the_reference(bits, granularity):
    check(
        config_of(bits=bits, weight_granularity=granularity, clip_gradient="lsq", activation="gelu")
    )


@pytest.mark.parametrize("time, source, batch", [(1, 1, 1), (1, 5, 3), (13, 1, 1), (11, 17, 2)])
def test_odd_shapes(time, source, batch):
    check(config_of(dropout=0.1), time=time, source=source, batch=batch, padded=source > 1)


def test_padded_targets_equal_the_reference():
    config = config_of(dropout=0.1)
    mask, own_mask = padding_mask(BATCH, SOURCE), padding_mask(BATCH, TIME)

    def reference(layer, x, memory):
        rows, memory = x.transpose(0, 1), memory.transpose(0, 1)
        own = lambda x: layer.self_attention(x, "self_attn.", own_mask, causal=True)  # noqa: E731
        cross = lambda x: layer.cross_attention(x, memory, "encoder_attn.", mask)  # noqa: E731
        rows = layer.block(rows, "self_attn_layer_norm", own)
        rows = layer.block(rows, "encoder_attn_layer_norm", cross)
        rows = layer.block(
            rows, "final_layer_norm", lambda x: layer.feed_forward(x, "feed_forward.")
        )
        return rows.transpose(0, 1)

    compare_with_reference(
        TransformerDecoderLayer(config),
        config,
        lambda layer, x, memory: layer(x, memory, mask, self_padding_mask=own_mask),
        reference,
        draw,
        padding=own_mask,
        memory_padding=mask,
    )


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_float_mode_equals_fairseq(pre_norm, activation):
    future = torch.full((TIME, TIME), float("-inf")).triu(1)
    for mask in (None, padding_mask(BATCH, SOURCE)):
        compare_with_fairseq(
            TransformerDecoderLayer(
                config_of(mode="float", pre_norm=pre_norm, activation=activation)
            ),
            fairseq_layer("decoder", pre_norm=pre_norm, activation=activation),
            lambda layer, x, memory, mask=mask: layer(x, memory, mask),
            lambda layer, x, memory, mask=mask: layer(
                x, memory, mask, self_attn_mask=future.to(x.dtype)
            )[0],
            draw,
        )


def test_the_future_changes_nothing():
    layer = TransformerDecoderLayer(config_of()).eval()
    x, memory = draw()
    layer(x, memory)
    other = x.clone()
    other[4:] = torch.randn(3, BATCH, HIDDEN)
    with torch.no_grad():
        before, after = layer(x, memory), layer(other, memory)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_nan_in_the_memory_reaches_the_output():
    layer = TransformerDecoderLayer(config_of())
    layer(*draw())
    x, memory = draw()
    memory[3, 1, 2] = float("nan")
    assert layer(x, memory)[:, 1].isnan().all()


def test_int8_gradients_have_little_noise():
    x, memory = (tensor.requires_grad_() for tensor in draw(time=13))
    found = []
    for backward in ("float", "int8"):
        torch.manual_seed(3)
        layer = TransformerDecoderLayer(config_of(backward=backward))
        found.append(gradients(layer, layer(x, memory), x, memory))
    exact, rounded = found
    for name in ("input 0", "input 1", "self_attn.qkv_weight", "encoder_attn.key_value_weight"):
        assert decibels(exact[name], rounded[name]) > 30, name


# One step at a time


def ready(**options):
    """A layer in eval mode, calibrated on some batch."""
    torch.manual_seed(options.pop("seed", 0))
    layer = TransformerDecoderLayer(config_of(**options)).eval()
    with torch.no_grad():
        layer(*draw())
    return layer


def step_by_step(layer, x, memory, mask):
    """(outputs [T, B, H], codes by clip name, of all steps together), one target token at a
    time."""
    state, outputs, codes = {}, [], {}
    for t in range(len(x)):
        with recorded(layer) as step:
            outputs.append(layer(x[t : t + 1], memory, mask, state=state))
        for name, found in step.codes.items():
            codes.setdefault(name, []).append(found)
    assert state["history"].shape == (x.shape[1], len(x), 3 * HIDDEN)
    return torch.cat(outputs), {name: in_rows(found, x, mask) for name, found in codes.items()}


def in_rows(found, x, mask):
    """Codes of all steps as the whole target has them: targets sentence by sentence, a memory
    without padding."""
    if len(found) == len(x) and len(found[0]) == x.shape[1]:
        return torch.stack(found, 1)
    sources = mask is not None and len(found) == 1 and len(found[0]) == mask.numel()
    return found[0][~mask.flatten()] if sources else found[0]


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_equal_the_whole_target(pre_norm, bits, padded):
    layer = ready(pre_norm=pre_norm, bits=bits, dropout=0.3)
    x, memory = draw()
    mask = padding_mask(BATCH, SOURCE) if padded else None
    with torch.no_grad(), recorded(layer) as whole:
        expected = layer(x, memory, mask)
    found, codes = step_by_step(layer, x, memory, mask)
    assert_same_codes(codes, whole.codes)
    assert (found - expected).abs().max() < 1e-5


def test_steps_equal_the_whole_target_in_float():
    layer = TransformerDecoderLayer(config_of(mode="float")).eval()
    x, memory = draw()
    with torch.no_grad():
        expected = layer(x, memory)
    found, _ = step_by_step(layer, x, memory, None)
    assert (found - expected).abs().max() < 1e-5


def test_the_state_may_be_reordered():
    """As beam search does: sentence i goes on from the past of sentence order[i]."""
    layer = ready()
    x, memory = draw()
    order = torch.tensor([2, 0, 0])
    state = {}
    for t in range(3):
        layer(x[t : t + 1], memory, state=state)
    reorder(state, order)
    found = layer(x[3:4], memory[:, order], state=state)
    with torch.no_grad():
        target = torch.cat([x[:3, order], x[3:4]])
        expected = layer(target, memory[:, order])[3:4]
    assert (found - expected).abs().max() < 1e-5


def test_a_step_that_comes_first_is_refused():
    """It sees one token, and would measure the clips of everything on that."""
    layer = TransformerDecoderLayer(config_of()).eval()
    x, memory = draw()
    with pytest.raises(ValueError, match="measured"):
        layer(x[:1], memory, state={})


def test_states_are_refused_where_they_cannot_work():
    layer = ready().train()
    x, memory = draw()
    with pytest.raises(ValueError, match="eval mode"):
        layer(x[:1], memory, state={})
    with pytest.raises(ValueError, match=r"one step \[1, 3, 48\]"):
        layer.eval()(x[:2], memory, state={})


def test_a_memory_of_another_batch_is_refused():
    layer = TransformerDecoderLayer(config_of())
    x, memory = draw()
    with pytest.raises(ValueError, match="memory"):
        layer(x, memory[:, :2])
