"""Layers of Llama, Mistral, Qwen2 and Qwen3 as fused ones."""

import pytest
import torch

from tests.layers.shapes import decibels
from tests.models.checks import (
    FLOAT,
    PADDING,
    WORDS,
    assert_same_in_float,
    assert_trains_and_comes_back,
    fused,
    left_padded,
    made,
    right_padded,
    transformers,
    words,
)

SHAPE = {
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MAKERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "llama with biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)
    ),
    "llama of long texts": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
            },
        )
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, sliding_window=5)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
    "qwen2 with windows": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=32)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_as_transformers_in_float(name):
    model = made(MAKERS[name])
    assert_same_in_float(model, right_padded((9, 9, 9)))
    batch = right_padded((11, 7, 1))
    assert_same_in_float(model, batch, batch["attention_mask"].bool())
    batch = left_padded((6, 12))
    assert_same_in_float(model, batch, batch["attention_mask"].bool())


@pytest.mark.parametrize(("name", "least"), [("llama", 25), ("qwen3", 20)])
def test_trains_and_comes_back(name, least, tmp_path):
    assert_trains_and_comes_back(made(MAKERS[name]), right_padded((13, 8)), tmp_path, least=least)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_other_attentions(attention):
    model = made(MAKERS["mistral"])
    model.set_attn_implementation(attention)
    batch = right_padded((11, 7))
    assert_same_in_float(model, batch, batch["attention_mask"].bool())


@pytest.mark.thorough  # transformers compiles its masks
def test_masks_of_flex_attention():
    """Which PyTorch itself trains with on a GPU alone."""
    model, batch = made(MAKERS["mistral"]), right_padded((11, 7))
    mine, present = fused(model, FLOAT), batch["attention_mask"].bool()
    mine.set_attn_implementation("flex_attention")
    expected, found = model(**batch), mine(**batch)
    torch.testing.assert_close(
        found.logits[present], expected.logits[present], rtol=1e-4, atol=1e-5
    )
    expected.loss.backward()
    found.loss.backward()
    first, second = (one.model.layers[0].mlp.up_proj.weight.grad for one in (mine, model))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


def test_decoding_with_a_cache():
    model = made(MAKERS["qwen2"]).eval()
    mine = fused(model)
    mine.train()(**right_padded((12, 12)))
    mine.eval()
    prompt = words(2, 5)
    whole = mine.generate(prompt, max_new_tokens=6, do_sample=False)
    assert whole.shape == (2, 11)
    cached = mine(whole, use_cache=True).logits
    assert decibels(mine(whole, use_cache=False).logits, cached) > 25
    with torch.no_grad():
        output = mine(whole[:, :7], use_cache=True)
        torch.testing.assert_close(output.logits, mine(whole[:, :7], use_cache=False).logits)
        assert output.past_key_values.get_seq_length() == 7
        steps = mine(whole[:, 7:], past_key_values=output.past_key_values, use_cache=True).logits
    assert decibels(cached[:, 7:], steps) > 25


def test_decoding_behind_padding():
    """As of each prompt alone."""
    mine = fused(made(MAKERS["llama"]))
    mine.train()(**right_padded((12, 12)))
    mine.eval()
    batch = left_padded((9, 4))
    together = mine.generate(**batch, max_new_tokens=5, do_sample=False)
    for row, length in enumerate((9, 4)):
        alone = mine.generate(
            batch["input_ids"][row : row + 1, -length:], max_new_tokens=5, do_sample=False
        )
        assert torch.equal(alone[0, length:], together[row, 9:])


def test_several_texts_in_a_row():
    """Position ids that begin anew: the model's mask keeps them apart, and so must the layers."""
    model = made(MAKERS["llama"])
    places = torch.cat([torch.arange(5), torch.arange(8)])[None]
    assert_same_in_float(
        model, {"input_ids": words(1, 13), "position_ids": places, "labels": words(1, 13)}
    )


def test_probabilities_of_attention():
    model = made(MAKERS["llama"]).eval()
    model.set_attn_implementation("eager")
    batch = {"input_ids": words(2, 6), "output_attentions": True}
    expected, found = model(**batch).attentions, fused(model).eval()(**batch).attentions
    assert len(found) == 2
    assert decibels(expected[1], found[1]) > 20
