"""Layers of transformers as fused ones, against the code of their classes."""

import copy
import re

import pytest
import torch
from torch import nn

import lsq
from lsq.models.architectures import LAYERS, fused_class
from tests.layers.shapes import decibels
from tests.models.zoo import (
    BERT,
    FLOAT,
    MODELS,
    PAIRS,
    VIT,
    WORDS,
    assert_same_alone,
    assert_same_gradients,
    assert_same_in_float,
    assert_trains_and_comes_back,
    batch_of,
    fused,
    gradients,
    images,
    left_padded,
    made,
    pairs,
    right_padded,
    without_dropout,
    words,
)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5 encoder"])
def test_the_same_as_transformers_in_float(name):
    """Sentences of T5 exceed the farthest distance; others see every bucket, or few."""
    plain = made(name)
    if name in PAIRS:
        batches = [pairs((9, 5, 3), (2, 10, 6))]
        if name in ("marian", "t5"):
            several = (
                pairs((2, 2), (9, 9)),
                pairs((4, 4), (7, 7)),
                pairs((3, 8), (5, 4), left_padded),
            )
            batches += several
        for batch in batches:
            assert_same_in_float(plain, *batch)
    elif name.startswith("vit"):
        assert_same_in_float(plain, images(5))
        mask = torch.ones(3, 17, dtype=torch.long)
        mask[1, 9:] = 0  # patches that are not there, as of a smaller image
        assert_same_in_float(plain, {**images(3), "attention_mask": mask})
    else:
        assert_same_in_float(plain, right_padded((9, 9, 9)))
        for batch in (right_padded((11, 7, 1)), left_padded((6, 12))):
            assert_same_in_float(plain, batch, batch["attention_mask"].bool())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_classifiers_in_float(name):
    plain = made(name, "ForSequenceClassification")
    assert_same_in_float(plain, {**right_padded((11, 7, 1)), "labels": torch.tensor([0, 2, 1])})


@pytest.mark.parametrize(
    "kind",
    [kind for kind, home in LAYERS.items() if home.endswith((".BertLayer", ".ViTLayer"))],
)
def test_every_layer_that_is_berts_or_vits(kind):
    assert_same_alone(kind, **(BERT if LAYERS[kind].endswith(".BertLayer") else VIT))


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 25) for name in ("bert", "roberta", "gpt2", "llama", "vit", "marian", "mbart")),
        *((name, 20) for name in ("qwen3", "t5", "t5 v1.1")),
    ],
)
def test_trains_and_comes_back(name, least, tmp_path):
    assert_trains_and_comes_back(made(name), batch_of(name, (13, 8)), tmp_path, least=least)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_linear_layers_alone_train_and_come_back(name, tmp_path):
    assert_trains_and_comes_back(made(name), batch_of(name, (17, 17)), tmp_path, whole=False)


# Batches that are empty


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "marian", "t5"])
def test_without_sentences(name):
    """Gradients are zeros, for which DDP waits, and the next pass is the first that counts."""

    def batch(sentences: int) -> dict[str, torch.Tensor]:
        given = words(sentences, 7)
        return images(sentences) if name == "vit" else {"input_ids": given, "labels": given}

    def trained(one: nn.Module) -> dict[str, torch.Tensor]:
        return {key: part.grad for key, part in one.named_parameters() if part.requires_grad}

    mine, other = fused(made(name)), fused(made(name))
    for change in (mine.train, mine.eval):
        change()
        output = mine(**batch(0))
        assert output.loss.isnan() and len(output.logits) == 0
        output.loss.backward()
        assert not any(one.any() for one in trained(mine).values())
    with torch.no_grad():
        mine(**batch(0))
    mine.train()
    for one in (mine, other):
        torch.manual_seed(3)
        one.zero_grad()
        one(**batch(3)).loss.backward()
    assert_same_gradients(trained(mine), trained(other), rtol=0, atol=0)
    states = mine.state_dict(), other.state_dict()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_nothing_but_padding(name):
    mine, given = fused(made(name)), right_padded((5, 3))
    given["attention_mask"] = torch.zeros_like(given["attention_mask"])
    output = mine(**given)
    assert output.logits.shape == (2, 5, WORDS) and output.loss.isfinite()
    output.loss.backward()
    layer = [one.grad for key, one in mine.named_parameters() if re.search(r"\.layers?\.0\.", key)]
    assert layer and not any(one.any() for one in layer if one is not None)
    mine.eval()
    with torch.no_grad():
        assert mine(**given).logits.isfinite().all()


# Decoding


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_decoding_with_a_cache(name):
    mine = fused(made(name))
    mine(**right_padded((12, 12)))
    mine.eval()
    whole = mine.generate(words(2, 5), max_new_tokens=6, do_sample=False)
    assert whole.shape == (2, 11)
    cached = mine(whole, use_cache=True).logits
    assert decibels(mine(whole, use_cache=False).logits, cached) > 25
    with torch.no_grad():
        output = mine(whole[:, :7], use_cache=True)
        torch.testing.assert_close(output.logits, mine(whole[:, :7], use_cache=False).logits)
        assert output.past_key_values.get_seq_length() == 7
        steps = mine(whole[:, 7:], past_key_values=output.past_key_values, use_cache=True).logits
    assert decibels(cached[:, 7:], steps) > 25


@pytest.mark.parametrize(("name", "beams"), [("marian", 2), ("t5 v1.1", 1)])
def test_decoding_from_an_encoder(name, beams):
    mine, (batch, _) = fused(made(name)), pairs((9, 5), (9, 5))
    mine(**batch)
    mine.eval()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    target = mine.generate(**source, max_new_tokens=6, min_new_tokens=6, num_beams=beams)
    assert target.shape == (2, 7)
    whole = mine(**source, decoder_input_ids=target, use_cache=False).logits
    assert decibels(whole, mine(**source, decoder_input_ids=target, use_cache=True).logits) > 20
    past, steps = None, []
    for word in target.split(1, dim=1):
        output = mine(**source, decoder_input_ids=word, past_key_values=past, use_cache=True)
        past, steps = output.past_key_values, [*steps, output.logits]
    assert decibels(whole, torch.cat(steps, dim=1)) > 20


def test_decoding_behind_padding():
    """As of each prompt alone."""
    mine = fused(made("llama"))
    mine(**right_padded((12, 12)))
    mine.eval()
    batch, options = left_padded((9, 4)), {"max_new_tokens": 5, "do_sample": False}
    together = mine.generate(**batch, **options)
    for row, length in enumerate((9, 4)):
        alone = mine.generate(batch["input_ids"][row : row + 1, -length:], **options)
        assert torch.equal(alone[0, length:], together[row, 9:])


# What the program does not compute


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_probabilities_of_attention(name):
    plain = made(name).eval()
    plain.set_attn_implementation("eager")
    batch, kinds = {"input_ids": words(2, 6), "output_attentions": True}, ["attentions"]
    if name in PAIRS:
        batch["decoder_input_ids"] = words(2, 5)
        kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    mine = fused(plain).eval()
    expected, found = plain(**batch), mine(**batch)
    for kind in kinds:
        assert len(found[kind]) == len(expected[kind])
        assert decibels(expected[kind][1], found[kind][1]) > 20
    if name == "bart":
        both = mine(**batch, output_hidden_states=True)
        assert len(both.decoder_hidden_states) == len(both.encoder_hidden_states) == 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "bart"])
def test_masks_of_other_attentions(name, attention):
    plain = made(name)
    plain.set_attn_implementation(attention)
    batch, present = pairs((11, 7), (6, 7)) if name == "bart" else (right_padded((11, 7)), None)
    if name == "bart":
        batch["decoder_attention_mask"] = present.long()
    assert_same_in_float(
        plain, batch, batch["attention_mask"].bool() if present is None else present
    )


@pytest.mark.slow
@torch.no_grad()
def test_masks_of_flex_attention():
    """A layer with such a mask runs its own code."""
    plain, batch = made("mistral").eval(), right_padded((11, 7))
    mine, present = fused(plain, FLOAT).eval(), batch["attention_mask"].bool()
    mine.set_attn_implementation("flex_attention")
    expected, found = (one(**batch).logits[present] for one in (plain, mine))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_several_texts_in_a_row():
    """Position ids that begin anew: the model's mask keeps them apart, and so must the layers."""
    places = torch.cat([torch.arange(5), torch.arange(8)])[None]
    batch = {"input_ids": words(1, 13), "position_ids": places, "labels": words(1, 13)}
    assert_same_in_float(made("llama"), batch)


def test_a_mask_that_no_program_has():
    """Words of a sentence that do not all see the same: the layer's own pass."""
    plain, ids = made("bert", "Model").eval(), words(2, 9)
    mine = fused(plain).train()
    mine(ids)
    mask = torch.ones(2, 1, 9, 9).tril().bool()
    expected, found = (
        one.eval()(ids, attention_mask=mask).last_hidden_state for one in (plain, mine)
    )
    assert decibels(expected, found) > 25


def test_what_has_no_program_is_the_layers_own_pass():
    plain = made("marian")
    mine = fused(plain, FLOAT)
    states, memory = torch.randn(2, 3, 64), torch.randn(2, 4, 64)
    each = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    each[1, 0, 2, :2] = False
    for given in ({"encoder_hidden_states": memory, "encoder_attention_mask": each}, {}):
        expected, found = (
            one.model.decoder.layers[0](states, None, **given) for one in (plain, mine)
        )
        torch.testing.assert_close(found, expected)


# Settings that are read from the layer


DROPOUTS = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125}


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("bert", DROPOUTS, "bert.encoder.layer.1"),
        ("vit", DROPOUTS, "vit.layers.1"),
        ("gpt2", {"attn_pdrop": 0.125, "resid_pdrop": 0.25}, "transformer.h.1"),
    ],
)
def test_dropout_is_read_from_the_layer(name, options, layer):
    mine, batch = fused(made(name, **options), FLOAT), batch_of(name, (9, 9))
    layer = mine.get_submodule(layer)
    first, second = (mine(**batch).logits for _ in range(2))
    assert not torch.equal(first, second)
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.125, 0.25)
    without_dropout(mine)
    assert torch.equal(mine(**batch).logits, mine(**batch).logits)
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.0, 0.0)


def test_dropouts_that_come_to_differ():
    mine, ids = fused(made("bert", "Model"), FLOAT), words(2, 9)
    mine(ids)
    mine.encoder.layer[1].output.dropout.p = 0.5
    with pytest.warns(UserWarning, match="it has different dropouts of residuals: 0.0, 0.5"):
        assert not torch.equal(mine(ids).last_hidden_state, mine(ids).last_hidden_state)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_what_is_read_of_encoders_and_decoders(name):
    dropouts = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    plain = made(name, "Model", **(dropouts if name == "bart" else {"dropout_rate": 0.25}))
    halves = [plain.encoder, plain.decoder]
    layers = [one.layers[0] if name == "bart" else one.block[1] for one in halves]
    for layer in layers:
        config = fused_class(layer).config_of(layer, FLOAT)
        found = config.dropout, config.attention_dropout, config.activation_dropout
        if name == "bart":
            assert found == (0.1, 0.2, 0.3)
            assert (config.activation, config.pre_norm) == ("gelu", False)
            assert config.head_columns == 64 // config.heads and config.bias
        else:
            assert found == (0.25, 0.25, 0.25) and config.pre_norm
            assert (config.softmax_scale, config.norm, config.bias) == (1.0, "rms", False)
            assert config.head_columns == 16
    if name == "t5":
        plain.decoder.block[1].layer[2].dropout.p = 0.5
        assert "decoder.block.1" not in lsq.convert(plain).fused


# Layers that no program is for


GPT2, BERT_LAYER = "gpt2 transformer.h.1", "bert bert.encoder.layer.1"
DIFFERENT = [
    (GPT2, "mlp.dropout", {"p": 0.5}, "it has different dropouts of residuals: 0.0, 0.5"),
    (GPT2, "", {"ln_1": nn.RMSNorm(64)}, "its ln_1 is a torch.*RMSNorm"),
    (GPT2, "mlp", {"act": nn.Tanh()}, "its activation is Tanh; there are"),
    (GPT2, "ln_1", {"eps": 0.5}, "it has different epsilons of norms: 0.5, 1e-05"),
    (GPT2, "", {"ln_1": None}, "its ln_1 is None"),
    (
        "marian model.decoder.layers.0",
        "encoder_attn",
        {"dropout": 0.5},
        "it has different dropouts of attention: 0.0, 0.5",
    ),
    (
        "marian model.encoder.layers.1",
        "",
        {"fc1": nn.Linear(64, 80, bias=False)},
        "some of its projections have a bias and others have none",
    ),
    (
        BERT_LAYER,
        "output",
        {"LayerNorm": nn.LayerNorm(64, bias=False)},
        r"one of its norms is LayerNorm.*, and no LayerNorm with a weight and a bias",
    ),
    (BERT_LAYER, "intermediate", {"dense": None}, "its intermediate.dense is None"),
]


@pytest.mark.parametrize(("where", "part", "change", "reason"), DIFFERENT)
def test_layers_that_differ_inside_are_not_fused(where, part, change, reason):
    name, layer = where.split()
    plain = made(name)
    for attribute, value in change.items():
        setattr(plain.get_submodule(f"{layer}.{part}".rstrip(".")), attribute, value)
    left = {one.name: one.reason for one in lsq.convert(plain).whole if one.reason}
    assert left.keys() == {layer} and re.search(reason, left[layer])


DECODER = {"is_decoder": True}


@pytest.mark.parametrize(
    ("name", "kind", "options", "reason"),
    [
        ("gpt2", None, {"add_cross_attention": True}, "its crossattention is a"),
        ("bert", "LMHeadModel", DECODER, "its attention is causal"),
        (
            "bert",
            "LMHeadModel",
            {**DECODER, "add_cross_attention": True},
            "its crossattention is a",
        ),
    ],
)
def test_decoders_are_left(name, kind, options, reason):
    report = lsq.convert(made(name, kind, **options))
    assert not report.fused and all(reason in one.reason for one in report.whole)
    assert report.converted


# Frozen parts


@pytest.mark.parametrize("frozen", ["encoder", "decoder"])
def test_one_half_is_frozen(frozen):
    """Gradients pass through a frozen decoder, and are not computed where nobody asks."""
    plain, (batch, present) = made("bart"), pairs((9, 5), (6, 7))
    plain.model.shared.requires_grad_(False)
    getattr(plain.model, frozen).requires_grad_(False)
    assert_same_in_float(plain, batch, present)
    mine = fused(plain)
    mine(**batch).loss.backward()
    halves = {key.split(".")[1] for key, one in gradients(mine).items() if one is not None}
    assert halves == {"encoder", "decoder"} - {frozen}


# The table of biases that T5's blocks share


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_t5(reentrant):
    """Reentrant checkpoints hand on other tensors, which know nothing of the table."""
    plain = made("t5")
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_in_float(plain, *pairs((9, 5), (6, 7)))


@pytest.mark.parametrize("left", [0, 1])
def test_some_blocks_of_t5_are_left(left):
    """Whoever makes the biases of pairs, and whoever reads them."""
    plain = made("t5")
    mine = copy.deepcopy(plain)
    for stack in (mine.encoder, mine.decoder):
        for number, block in enumerate(stack.block):
            if number != left:
                assert lsq.convert(block, FLOAT).fused == ("",)
    batch, _ = pairs((9, 5), (6, 7))
    losses = [one(**batch).loss for one in (plain, mine)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    tables = [
        {key: one for key, one in gradients(each).items() if key.endswith("attention_bias.weight")}
        for each in (mine, plain)
    ]
    assert len(tables[0]) == 2
    assert_same_gradients(*tables, atol=1e-6)


def test_an_encoder_alone():
    plain = made("t5 encoder")
    batch = {name: value for name, value in right_padded((9, 4)).items() if name != "labels"}
    present, mine = batch["attention_mask"].bool(), fused(plain, FLOAT)
    expected, found = (one(**batch).last_hidden_state[present] for one in (plain, mine))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert decibels(expected, fused(plain)(**batch).last_hidden_state[present]) > 25


def test_float16_saturates():
    """As T5's own blocks do: values beyond float16 stay finite."""
    plain = made("t5 encoder")
    with torch.no_grad():
        plain.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e7)
    y, *_ = fused(plain, FLOAT).encoder.block[0](torch.randn(2, 4, 64).half())
    assert y.dtype == torch.float16 and y.isfinite().all()
    assert y.abs().max() == torch.finfo(torch.float16).max
