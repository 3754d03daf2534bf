"""Small models of transformers by name, batches for them, and what holds for every fused one."""

import copy
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import lsq
from lsq.config import QuantConfig
from lsq.layers import ProgramModule, weight_state
from lsq.models import float_state_dict
from lsq.optim import Adam
from tests.layers.shapes import decibels

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers
transformers = pytest.importorskip("transformers")

WORDS = 96
PADDING = 1
FLOAT = QuantConfig(mode="float")
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of Llama's layers."""

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
}
STILL = {"num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": WORDS, "pad_token_id": PADDING}
BERT = {**SIZES, **STILL, **TEXT, "max_position_embeddings": 32}
VIT = {**SIZES, **STILL, "image_size": 16, "patch_size": 4}
LLAMA = {**SIZES, **TEXT, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {
    **TEXT,
    "n_layer": 2,
    "n_embd": 64,
    "n_inner": 80,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
MARIAN = {
    **TEXT,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
T5 = {
    **TEXT,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
EAGER = {"attn_implementation": "eager"}
UPCAST = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SHAPES = {"Bert": BERT, "Roberta": BERT, "GPT2": GPT2, "ViT": VIT, "T5": T5, "MT5": T5} | {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3"), LLAMA),
    **dict.fromkeys(("Marian", "Bart", "MBart", "M2M100", "Pegasus"), MARIAN),
}
"""Names of configurations -> what the smallest ones say."""
MODELS = {
    "bert": ("Bert", "ForMaskedLM", {}),
    "bert eager": ("Bert", "ForMaskedLM", {**EAGER, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", "ForMaskedLM", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "gpt2": ("GPT2", "LMHeadModel", {}),
    "gpt2 eager": ("GPT2", "LMHeadModel", {**EAGER, **UPCAST}),
    "gpt2 relu": (
        "GPT2",
        "LMHeadModel",
        {"scale_attn_weights": False, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    ),
    "llama": ("Llama", "ForCausalLM", {}),
    "llama with biases": ("Llama", "ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama of long texts": ("Llama", "ForCausalLM", {"rope_parameters": YARN}),
    "mistral": ("Mistral", "ForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2", "ForCausalLM", {}),
    "qwen2 with windows": ("Qwen2", "ForCausalLM", WINDOWS),
    "qwen3": ("Qwen3", "ForCausalLM", {"head_dim": 32}),
    "vit": ("ViT", "ForImageClassification", {}),
    "vit eager": (
        "ViT",
        "ForImageClassification",
        {**EAGER, "qkv_bias": False, "hidden_act": "relu"},
    ),
    "marian": ("Marian", "MTModel", {"activation_function": "swish"}),
    "bart": ("Bart", "ForConditionalGeneration", {}),
    "mbart": ("MBart", "ForConditionalGeneration", {}),
    "m2m100": ("M2M100", "ForConditionalGeneration", {}),
    "pegasus": ("Pegasus", "ForConditionalGeneration", {}),
    "t5": ("T5", "ForConditionalGeneration", {}),
    "t5 v1.1": ("T5", "ForConditionalGeneration", GATED),
    "mt5": ("MT5", "ForConditionalGeneration", {}),
    "t5 encoder": ("T5", "EncoderModel", {}),
}
"""Names -> configuration, the rest of the class's name, what the configuration says besides."""
PAIRS = ("marian", "bart", "mbart", "m2m100", "pegasus", "t5", "t5 v1.1", "mt5")
"""Models of two sentences."""


def plain(name: str, kind: str | None = None, **options) -> torch.nn.Module:
    """A model as transformers makes it; `kind`: the rest of another class's name."""
    family, head, own = MODELS[name]
    config = getattr(transformers, family + "Config")(**{**SHAPES[family], **own, **options})
    return getattr(transformers, family + (head if kind is None else kind))(config)


def made(name: str, kind: str | None = None, *, seed: int = 1, **options) -> torch.nn.Module:
    """The same in training mode; its norms and biases are not all the same."""
    torch.manual_seed(seed)
    return varied(plain(name, kind, **options))


def varied(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module.train()


def words(*shape: int, seed: int = 1) -> torch.Tensor:
    """int64, none of which is padding."""
    return torch.randint(PADDING + 1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def right_padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A batch of sentences of these lengths, as a tokenizer makes it, with labels."""
    ids = words(len(lengths), max(lengths))
    present = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = ids.where(present, PADDING)
    return {"input_ids": ids, "attention_mask": present.long(), "labels": ids.where(present, -100)}


def left_padded(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same with padding before the sentences, as for decoding; without labels."""
    batch = right_padded(lengths)
    return {name: value.flip(1) for name, value in batch.items() if name != "labels"}


def pairs(
    source: tuple[int, ...], target: tuple[int, ...], padded=right_padded
) -> tuple[dict, torch.Tensor]:
    """A batch of sentences and translations, and bool [B, T], where the latter are."""
    batch, wanted = padded(source), right_padded(target)
    return {**batch, "labels": wanted["labels"]}, wanted["attention_mask"].bool()


def images(count: int) -> dict[str, torch.Tensor]:
    drawn = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": drawn, "labels": torch.arange(count) % 3}


def batch_of(name: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return images(len(lengths)) if name.startswith("vit") else right_padded(lengths)


def adapted(model: torch.nn.Module, targets=LINEARS, **options) -> torch.nn.Module:
    """`model` with adapters of PEFT that add something."""
    peft = pytest.importorskip("peft")
    options = {"r": 4, "lora_alpha": 6, "target_modules": targets, **options}
    torch.manual_seed(5)
    found = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found


@contextmanager
def codes_are_kept(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, a pass that rounds a weight again raises AssertionError."""

    def refuse(*_, **__):
        raise AssertionError("codes of a weight were made again")

    for module in model.modules():
        if isinstance(module, ProgramModule):
            for codes in module.weight_state._weights.values():
                codes.writers.clear()  # so that whatever rounds comes to _write_first
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_state, "_write_first", refuse)
        yield


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """`model`, whose modules of dropout drop nothing any more, as TRL makes it of models."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def layers_of(model: torch.nn.Module) -> int:
    """How many whole layers it has."""
    name = type(model).__name__
    if "T5" in name:
        return 3 if name.endswith("EncoderModel") else 5
    return 4 if model.config.is_encoder_decoder else model.config.num_hidden_layers


def fused(model: torch.nn.Module, quant: QuantConfig | None = None) -> torch.nn.Module:
    """A copy of `model`, all of whose layers are fused."""
    mine = copy.deepcopy(model)
    report = lsq.convert(mine, quant)
    assert len(report.fused) == len(report.whole) == layers_of(model), report
    return mine


def assert_same_gradients(found, wanted, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """Mappings of names to gradients, or to None."""
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (one is None) == (found[name] is None), name
        if one is not None:
            torch.testing.assert_close(
                found[name], one, rtol=rtol, atol=atol, msg=lambda why, at=name: f"{at}: {why}"
            )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for name, one in model.named_parameters()}


def assert_same_in_float(
    model: torch.nn.Module, batch: dict, present: torch.Tensor | None = None
) -> None:
    """Fused in float mode, it computes and differentiates the same, where `present` [B, T] is."""
    mine = fused(model, FLOAT)
    expected, found = (one(**batch, use_cache=False) for one in (model, mine))
    chosen = slice(None) if present is None else present
    torch.testing.assert_close(found.logits[chosen], expected.logits[chosen], rtol=1e-4, atol=1e-5)
    model.zero_grad()
    for one in (expected, found):
        (one.logits[chosen].square().mean() if one.loss is None else one.loss).backward()
    assert_same_gradients(gradients(mine), gradients(model))


def assert_same_alone(kind: str, **shape) -> None:
    """A layer by itself of that class, fused in float mode, gives what it gave."""
    config = getattr(transformers, kind.replace("Layer", "Config"))(
        **shape, attn_implementation="sdpa"
    )
    file = type(config).__module__.replace("configuration", "modeling")
    torch.manual_seed(1)
    layer = varied(getattr(importlib.import_module(file), kind)(config))
    mine, x = copy.deepcopy(layer), torch.randn(2, 7, config.hidden_size)
    assert lsq.convert(mine, FLOAT).fused == ("",)
    torch.testing.assert_close(mine(x), layer(x), rtol=1e-4, atol=1e-5)


def trained(model: torch.nn.Module, batch: dict, optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trains_and_comes_back(
    model: torch.nn.Module, batch: dict, folder, least: float = 25.0, *, whole: bool = True
) -> None:
    """In int8 it is near the float model, learns, and saves what that loads; `whole`: fused."""
    mine = fused(model) if whole else copy.deepcopy(model)
    if not whole:
        assert lsq.convert(mine, fused=False).converted
    present = batch.get("attention_mask", torch.ones(())).bool().expand(batch["labels"].shape)
    assert decibels(model.eval()(**batch).logits[present], mine(**batch).logits[present]) > least
    losses = trained(mine, batch, Adam(mine.parameters(), lr=1e-2), 8)
    assert losses[-1] < losses[0] - 0.5, losses
    state = float_state_dict(mine)
    assert state.keys() == model.state_dict().keys()
    for saved in ("converted", "reverted"):
        mine.save_pretrained(folder / saved)
        again, information = type(model).from_pretrained(folder / saved, output_loading_info=True)
        assert not any(information.values()), information
        for name, value in again.state_dict().items():
            assert torch.equal(value, state[name]), name
        lsq.revert(mine)
