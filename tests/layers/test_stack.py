"""Stacks and language models: against PyTorch in float64, learning, a word at a time, refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import Packing, TransformerLanguageModel
from lsq.layers.embedding import sinusoidal_table
from lsq.layers.memory import plan_memory, release_memory
from tests.layers.reference import ReferenceLayer

WORDS, PADDING, HIDDEN, HEADS = 29, 1, 32, 4


def model_of(*, mode="int8", pre_norm=True, norm="layer", **options) -> TransformerLanguageModel:
    torch.manual_seed(4)
    config = LayerConfig(
        hidden=HIDDEN,
        heads=HEADS,
        feed_forward=48,
        activation="gelu",
        pre_norm=pre_norm,
        norm=norm,
        dropout=options.pop("dropout", 0.0),
        quant=QuantConfig(mode=mode),
    )
    return TransformerLanguageModel(WORDS, config, layers=2, padding_idx=PADDING, **options)


def draw(sentences=3, time=9, *, padded=True) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the words after them), with padding at the end of all sentences but the first."""
    words = torch.randint(2, WORDS, (sentences, time + 1))
    tokens, target = words[:, :-1].clone(), words[:, 1:].clone()
    for index in range(1, sentences if padded else 1):
        tokens[index, time - index :] = target[index, time - index :] = PADDING
    return tokens, target


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def plain(model: TransformerLanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the same formulas in float64; padding at the end changes nothing before it."""
    state = {
        name: value.detach().double()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }

    table = state.get(
        "embed_tokens.position_weight",
        sinusoidal_table(tokens.shape[1] + 2, HIDDEN, PADDING).double(),
    )
    x = state["embed_tokens.weight"][tokens] * HIDDEN**0.5 + table[PADDING + 1 :][: tokens.shape[1]]
    x = x.transpose(0, 1)
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): one for name, one in state.items() if prefix in name}
        config = replace(layer.config, quant=QuantConfig(mode="float"))
        x = ReferenceLayer(config, own).encoder_layer(x, causal=True)
    norm = state["layer_norm.weight"], state["layer_norm.bias"]
    x = functional.layer_norm(x.transpose(0, 1), (HIDDEN,), *norm)
    return functional.linear(x, state["output_projection.weight"])


def plain_loss(model, tokens, target, smoothing=0.0):
    options = {"ignore_index": PADDING, "reduction": "sum", "label_smoothing": smoothing}
    return functional.cross_entropy(plain(model, tokens).transpose(1, 2), target, **options)


@pytest.mark.parametrize("options", [{}, {"positions": "learned", "tied": False}])
def test_float_mode_equals_the_formulas(options):
    model, (tokens, target) = model_of(mode="float", **options), draw()
    expected, words = plain(model, tokens), tokens != PADDING
    logits = model(tokens)
    assert (logits[words] - expected[words]).abs().max() < 1e-5
    assert not logits[~words].any()
    loss, nll = model(tokens, target, 0.1)
    torch.testing.assert_close(nll.double(), plain_loss(model, tokens, target), rtol=1e-6, atol=0)
    # fairseq's share of each word
    smoothed = plain_loss(model, tokens, target, 0.1 * WORDS / (WORDS - 1))
    torch.testing.assert_close(loss.double(), smoothed, rtol=1e-6, atol=0)
    assert loss.requires_grad and not nll.requires_grad


def test_int8_is_close_to_float():
    model, (tokens, target) = model_of(), draw()
    words = tokens != PADDING
    expected = plain(model, tokens)[words]
    error = (model(tokens)[words] - expected).square().mean() / expected.square().mean()
    assert 0 < error < 1e-2
    assert (model(tokens, target)[0] / plain_loss(model, tokens, target) - 1).abs() < 0.02


@pytest.mark.parametrize("options", [{}, {"pre_norm": False}, {"norm": "rms"}])
@torch.no_grad()
def test_steps_equal_the_whole_and_the_future_changes_nothing(options):
    """All rows of all layers, also after sentences were chosen; padding is not computed."""
    model, (tokens, _) = model_of(**options).eval(), draw(padded=False)
    assert any("norm.bias" in name for name in model.state_dict()) == ("norm" not in options)
    before, future = model(tokens), tokens.clone()
    future[:, 5:] = torch.randint(2, WORDS, tokens[:, 5:].shape)
    after = model(future)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])
    states = {}
    for time in range(1, 7):
        if time == 4:
            order = torch.tensor([2, 2])
            tokens = tokens[order]
            model.reorder(states, order)
        found = model.step(tokens[:, :time], states)
        packing = Packing(shape=(len(tokens), time))
        for step, whole in zip(found, model.rows(tokens[:, :time], packing), strict=True):
            assert (step - packing.unpack(whole)[:, -1]).abs().max() < 1e-5
    assert len(found) == 4 and len(states) == 2
    tokens[1, 7:] = PADDING
    assert {len(rows) for rows in model.rows(tokens, Packing(tokens == PADDING))} == {16}


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_it_learns_a_rule_and_goes_on_from_a_prefix(mode):
    """Words count upwards; decoding from a state continues so."""
    model = model_of(mode=mode, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        words = (torch.randint(0, 27, (8, 1)) + torch.arange(9)) % 27 + 2
        optimizer.zero_grad()
        loss, _ = model(words[:, :-1], words[:, 1:])
        (loss / 64).backward()
        optimizer.step()
    assert loss / 64 < 0.5
    model.eval()
    tokens, states = torch.tensor([[4, 5], [20, 21], [27, 28]]), {}
    model.next_word(tokens[:, :1], states)
    for step in range(5):
        if step == 2:
            order = torch.tensor([2, 1])
            tokens = tokens[order]
            model.reorder(states, order)
        logits = model.next_word(tokens, states)
        with torch.no_grad():
            torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=1e-4, atol=1e-4)
        tokens = torch.cat([tokens, logits.argmax(dim=1, keepdim=True)], dim=1)
    assert tokens.tolist() == [[27, 28, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25, 26]]


def test_state_dicts_carry_on_to_the_bit():
    model, batches = model_of(dropout=0.1), [draw() for _ in range(4)]
    for tokens, target in batches[:2]:
        model(tokens, target)[0].backward()
    copied = model_of(dropout=0.1)
    copied.load_state_dict(copy.deepcopy(model.state_dict()))
    for one in (model, copied):
        one.zero_grad()
        torch.manual_seed(8)
        for tokens, target in batches[2:]:
            one(tokens, target)[0].backward()
    assert all(map(torch.equal, gradients(model), gradients(copied)))


def test_planned_memory_changes_nothing():
    found = []
    for planned in (True, False):
        model, (tokens, target) = model_of(dropout=0.1), draw(padded=False)
        model(tokens, target)[0].backward()
        model.zero_grad()
        if planned:
            step = lambda m=model, t=tokens, w=target: m(t, w)[0]  # noqa: E731
            assert plan_memory(model, step, mode="guard") is not None
        torch.manual_seed(9)
        model(tokens[:2, :6], target[:2, :6])[0].backward()
        release_memory(model)
        found.append(gradients(model))
    assert all(map(torch.equal, *found))


def test_mistakes_are_named():
    model, (tokens, target), states = model_of(max_positions=9), draw(), {}
    with pytest.raises(ValueError, match="eval mode"):
        model.next_word(tokens[:, :1], {})
    model(tokens, target)  # measures clips
    model.eval()
    model.step(tokens[:, :1], states)
    for call, message in (
        (
            lambda: model(tokens, target[:, 1:]),
            r"the targets are \(3, 8\); they must be \(3, 9\)",
        ),
        (lambda: model(*draw(time=10)), "longer than max_positions = 9"),
        (lambda: model(torch.zeros(0, 3, dtype=torch.int64)), "at least one word"),
        (
            lambda: model.step(tokens[:, :5], {}),
            "5 words are given, but the states hold 0; .* word by word",
        ),
        (
            lambda: model.step(tokens[:, :1], states),
            "1 words are given, but the states hold 1; .* empty states",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    model.step(tokens[:, :2], states)
