"""Decoding one word at a time gives what the whole gives."""

from contextlib import nullcontext

import pytest
import torch

from lsq.layers import TransformerDecoderLayer, TransformerEncoderLayer, decoding
from lsq.layers.decoding import reorder
from lsq.run.cuda import CUDA
from tests.layers.examples import SOURCE, mode_on
from tests.layers.oracle import Outcome, assert_same_codes, recorded
from tests.layers.shapes import ATTENTIONS, HIDDEN, config_of, padding_mask
from tests.layers.test_programs import forward_of
from tests.ops.cuda import current_device

TIME, MEMORY, BATCH = 7, 9, 3
DECODED = {"weight_format": "nvfp4", "activation_format": "nvfp4"}


def draw():
    return torch.randn(TIME, BATCH, HIDDEN), torch.randn(MEMORY, BATCH, HIDDEN)


@torch.no_grad()
def ready(kind, **options):
    """A layer in eval mode, calibrated on some batch."""
    torch.manual_seed(0)
    if kind == "encoder":
        layer = TransformerEncoderLayer(config_of(**options), causal=True).eval()
        layer(draw()[0])
    else:
        layer = TransformerDecoderLayer(config_of(**options)).eval()
        layer(*draw())
    return layer


def step(layer, word, memory, mask, state):
    """Run one step of either layer: word [B, H] -> [B, H]."""
    if isinstance(layer, TransformerEncoderLayer):
        return layer.step(word, state)
    return layer(word[None], memory, mask, state=state)[0]


def by_steps(layer, x, memory, mask, look=recorded):
    """(outputs [T, B, H], codes by clip name, of all steps together), a word at a time."""
    state, outputs, codes = {}, [], {}
    for word in x:
        with look(layer) as one:
            outputs.append(step(layer, word, memory, mask, state))
        for name, found in one.codes.items():
            codes.setdefault(name, []).append(found)
    config = layer.config
    columns = config.query_columns + 2 * config.key_columns
    assert state["history"].shape == (x.shape[1], len(x), columns)
    assert state["history"].dtype == (torch.int8 if config.quant.coded else torch.float32)
    return torch.stack(outputs), {name: in_rows(found, x, mask) for name, found in codes.items()}


def in_rows(found, x, mask):
    """Codes of all steps as the whole target has them; of a memory, without padding."""
    if len(found) == len(x) and len(found[0]) == x.shape[1]:
        return torch.stack(found, 1)
    sources = mask is not None and len(found) == 1 and len(found[0]) == mask.numel()
    return found[0][~mask.flatten()] if sources else found[0]


def check(layer, *, padded=False, atol=1e-5, same_codes=True):
    x, memory = draw()
    mask = padding_mask(BATCH, MEMORY) if padded else None
    inputs = (x,) if isinstance(layer, TransformerEncoderLayer) else (x, memory, mask)
    look = recorded if same_codes else lambda layer: nullcontext(Outcome({}))
    with torch.no_grad(), look(layer) as whole:
        expected = layer(*inputs)
    found, codes = by_steps(layer, x, memory, mask, look)
    if same_codes:
        assert_same_codes(codes, whole.codes)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0.0)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("quant", [{}, {"bits": 4}, {"mode": "float"}])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_steps_equal_the_whole_target(kind, pre_norm, quant, padded, norm):
    check(ready(kind, pre_norm=pre_norm, norm=norm, dropout=0.3, **quant), padded=padded)


@pytest.mark.parametrize(
    "kind, options, atol",
    [
        *(
            ("encoder", {"attention": attention, "mode": mode}, 0.05 if mode == "int8" else 1e-5)
            for attention in ATTENTIONS.values()
            for mode in ("float", "int8")
        ),
        ("decoder", {"attention": ATTENTIONS["all"], "mode": "float"}, 1e-5),
        ("encoder", DECODED, 1e-5),
    ],
)
def test_steps_of_other_layers(kind, options, atol):
    """The codes that are kept have turned."""
    check(ready(kind, **options), atol=atol, same_codes=False)


def test_steps_of_decoded_values_on_cuda():
    layer = ready("encoder", **DECODED)
    layer.backend = CUDA(current_device())
    check(layer, same_codes=False)


@pytest.mark.parametrize(
    "build",
    [
        lambda mode: decoding.decoder_step(config_of(), 4, SOURCE, mode),
        lambda mode: decoding.encoder_step(config_of(), 4, 3, mode),
    ],
)
def test_a_step_appends_one_row_to_each_sentence(build):
    program = build(mode_on(training=False, backward=False))
    assert [tensor.shape for tensor in program.outputs] == [(3, 48), (15, 144)]
    assert forward_of(program)["Append"] == 1


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_state_may_be_reordered(kind):
    """As beam search does: sentence i goes on from the past of sentence order[i]."""
    layer, order, state = ready(kind), torch.tensor([2, 0, 0]), {}
    x, memory = draw()
    for word in x[:3]:
        step(layer, word, memory, None, state)
    reorder(state, order)
    target, memory = torch.cat([x[:3, order], x[3:4, order]]), memory[:, order]
    with torch.no_grad():
        expected = layer(target, *((memory,) if kind == "decoder" else ()))[3]
    found = step(layer, x[3, order], memory, None, state)
    assert (found - expected).abs().max() < 1e-5


def test_layers_that_cannot_decode_say_so():
    """A step that comes first sees one word, and would measure the clips of everything on that."""
    x, memory = draw()
    encoder, decoder = TransformerEncoderLayer, TransformerDecoderLayer
    for call, message in (
        (lambda: encoder(config_of()).eval().step(x[0], {}), "causal=True"),
        (lambda: ready("encoder").train().step(x[0], {}), "eval mode"),
        (lambda: encoder(config_of(), causal=True).eval().step(x[0], {}), "measured"),
        (lambda: decoder(config_of()).eval()(x[:1], memory, state={}), "measured"),
        (lambda: ready("decoder").train()(x[:1], memory, state={}), "eval mode"),
        (lambda: ready("decoder")(x[:2], memory, state={}), r"one step \[1, 3, 48\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
