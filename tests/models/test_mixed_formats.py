"""Formats by patterns of names in layers that have one product of several weights."""

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from tests.layers.shapes import decibels
from tests.models.checks import PADDING, WORDS, made, right_padded, transformers

SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": PADDING,
}
TRANSLATOR = {
    "vocab_size": WORDS,
    "d_model": 64,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "pad_token_id": PADDING,
    "decoder_start_token_id": PADDING,
}
MAKERS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, intermediate_size=128)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SHAPE, intermediate_size=128)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**TRANSLATOR, d_kv=32, d_ff=128, feed_forward_proj="gated-gelu")
    ),
}


def converted(name: str, *, fused: bool = True, **formats: str) -> torch.nn.Module:
    """After a pass that has measured its clips, in eval mode."""
    model = made(MAKERS[name])
    lsq.convert(model, QuantConfig(**formats), fused=fused, minimum_width=32)
    model(**right_padded((9, 5)))
    return model.eval()


@pytest.mark.parametrize(
    "name, formats, given",
    [
        (
            "llama",
            {"weight_format": "int8,*q_proj*=int4,*k_proj*=int8"},
            r"int4 to model\.layers\.0\.self_attn\.q_proj\.w",
        ),
        (
            "llama",
            {"weight_format": "int4,*.1.*v_proj*=int8"},
            r"int8 to model\.layers\.1\.self_attn\.v_proj\.weight; but",
        ),
        (
            "llama",
            {"gradient_format": "int8,*k_proj*=mxint8"},
            r"gradient_format gives int8 to .*, mxint8 to .*k_proj",
        ),
        (
            "llama",
            {"activation_format": "int8,*up_proj*=nvfp4"},
            r"int8 to the input of .*gate_proj.weight, nvfp4 to the",
        ),
        (
            "bert",
            {"weight_format": "int8,*query*=int4"},
            r"int4 to .*query.weight, int8 to .*key.weight, int8 to .*value",
        ),
        (
            "t5",
            {"weight_format": "int8,*EncDecAttention.k*=int4"},
            r"int4 to decoder.*EncDecAttention.k.weight, int8 to",
        ),
    ],
)
def test_one_product_has_one_format(name, formats, given):
    model = made(MAKERS[name])
    before = [(type(module), set(vars(module))) for module in model.modules()]
    with pytest.raises(
        ValueError, match=given + r".*: give all of them one format, or call lsq.convert with fused"
    ):
        lsq.convert(model, QuantConfig(**formats), minimum_width=32)
    assert before == [(type(module), set(vars(module))) for module in model.modules()]


def test_linear_layers_by_themselves_have_their_own():
    model = converted("llama", fused=False, weight_format="int8,*q_proj*=int4,*k_proj*=int8")
    found = {
        name.rpartition(".")[2]: one.quant.weight_format
        for name, one in model.named_modules()
        if isinstance(one, QuantizedLinear)
    }
    assert found.pop("q_proj") == "int4" and set(found.values()) == {"int8"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama", "int8,*gate_proj*=int4"),
        ("t5", "int8,*EncDecAttention.[kv]*=int4"),
        pytest.param("llama", "int8,*[qkv]_proj*=int4", marks=pytest.mark.thorough),
        pytest.param("t5", "int8,*EncDecAttention.q*=int4,*wi_1*=int4", marks=pytest.mark.thorough),
    ],
)
def test_other_mixtures_are_those_of_linear_layers(name, text):
    exact, batch = made(MAKERS[name]).eval(), right_padded((9, 5))
    one, other, wide = (
        converted(name, fused=fused, weight_format=form)
        for fused, form in ((True, text), (False, text), (True, "int8"))
    )
    present = batch["attention_mask"].bool()
    found = [model(**batch).logits[present] for model in (exact, one, other, wide)]
    narrow, separate, eight = (decibels(found[0], logits) for logits in found[1:])
    assert abs(narrow - separate) < 3 and eight - narrow > 0.5
