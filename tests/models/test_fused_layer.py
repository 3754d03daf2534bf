"""What every fused layer goes through: copies, files, checkpointing, frozen weights, decoding."""

import copy
import functools
import io
import pickle
import random
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lsq
from lsq.config import QuantConfig
from lsq.layers.memory import plan_memory, release_memory
from lsq.layers.module import ProgramModule
from lsq.models import float_state_dict
from lsq.models.fused_layer import FusedLayer
from tests.layers.shapes import decibels
from tests.models.zoo import (
    WORDS,
    assert_same_gradients,
    fused,
    made,
    plain,
    right_padded,
    transformers,
    words,
)

BATCH = right_padded((11, 6))


@pytest.fixture
def model() -> nn.Module:
    """A fused Llama that has measured its clips."""
    model = fused(made("llama"))
    loss(model).backward()
    model.zero_grad()
    return model


def loss(model: nn.Module, seed: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    return model(**BATCH).loss


def gradients(model: nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, seed).backward()
    return {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def layers_of(model: nn.Module) -> list[FusedLayer]:
    return [one for one in model.modules() if isinstance(one, FusedLayer)]


def assert_twins(model: nn.Module, other: nn.Module, **tolerance) -> None:
    """Both compute the same losses and gradients, of the same parameters."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    assert_same_gradients(gradients(other), gradients(model), **tolerance)


def test_copies(model):
    assert_twins(model, copy.deepcopy(model))
    assert_twins(model, pickle.loads(pickle.dumps(model)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_twins(model, torch.load(file, weights_only=False))


def test_state_dicts_go_both_ways(model):
    again = fused(made("llama", seed=5))
    again.load_state_dict(model.state_dict())
    assert_twins(model, again)
    floats = made("llama", seed=5)
    floats.load_state_dict(float_state_dict(model))
    fresh = fused(made("llama", seed=6))
    fresh.load_state_dict(floats.state_dict())
    present = BATCH["attention_mask"].bool()
    assert decibels(floats(**BATCH).logits[present], fresh(**BATCH).logits[present]) > 20
    with pytest.raises(RuntimeError, match="self_attn_qkv_weight_clip"):
        floats.load_state_dict(model.state_dict())


def test_a_conversion_that_fails_leaves_the_model_as_it_was(monkeypatch):
    """Also where queries, keys and values lie, and what transformers reads of the model."""
    model, names = made("llama"), []
    plain = [(type(one), vars(one).keys()) for one in model.modules()]
    state, places = model.state_dict(), [one.data_ptr() for one in model.parameters()]

    def fail(self):
        names.append(1)
        if len(names) == 2:
            raise MemoryError("half way")

    monkeypatch.setattr(FusedLayer, "join", fail)
    with pytest.raises(MemoryError, match="half way"):
        lsq.convert(model)
    assert [(type(one), vars(one).keys()) for one in model.modules()] == plain
    assert places == [one.data_ptr() for one in model.parameters()]
    assert model.state_dict().keys() == state.keys() and model._no_split_modules == {
        "LlamaDecoderLayer"
    }
    monkeypatch.undo()
    assert len(lsq.convert(model).fused) == 2


def test_it_comes_back(model):
    assert model._no_split_modules == model.model._no_split_modules == {"FusedLlamaDecoderLayer"}
    keys = model.state_dict().keys()
    assert any(key.endswith("self_attn_qkv_weight_clip") for key in keys)
    lsq.revert(model)
    assert type(model.model.layers[0]) is transformers.models.llama.modeling_llama.LlamaDecoderLayer
    assert model.state_dict().keys() == made("llama").state_dict().keys()
    assert not vars(model.model.layers[0]).keys() & set(ProgramModule.STATE)
    assert model._no_split_modules == {"LlamaDecoderLayer"}
    loss(model).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(model, reentrant):
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_twins(model, twin, rtol=1e-4, atol=1e-6)
    assert model.model.layers[0].schedule.passes == twin.model.layers[0].schedule.passes


def test_frozen_parameters_get_no_gradient(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" in name or name.endswith("k_proj.weight"))
    found = gradients(model)
    assert len(found) == 4
    assert all(gradient.any() for gradient in found.values())


def test_a_frozen_model_gives_gradients_to_its_input(model):
    model.requires_grad_(False)
    x = model.model.embed_tokens(BATCH["input_ids"]).requires_grad_()
    model(inputs_embeds=x, labels=BATCH["labels"]).loss.backward()
    assert x.grad[:, :5].any(dim=2).all()


def test_on_the_meta_device():
    torch.manual_seed(1)
    with torch.device("meta"):
        model = plain("llama")
    lsq.convert(model)
    model.to_empty(device="cpu")
    model.load_state_dict(made("llama").state_dict(), strict=False)
    model.model.rotary_emb = plain("llama").model.rotary_emb
    expected = fused(made("llama"))
    assert_twins(expected, model.train(), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_torch_compile(model):
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    torch.testing.assert_close(loss(compiled), loss(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    plain = made("qwen2")
    model = fused(plain).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        output = model(**BATCH)
    output.loss.backward()
    assert all(
        parameter.grad.dtype == parameter.dtype
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    present = BATCH["attention_mask"].bool()
    assert decibels(plain(**BATCH).logits[present], output.logits.float()[present]) > 20


def test_layers_that_have_no_program_stay():
    def report_of(**changes) -> str:
        return str(lsq.convert(plain("llama", **changes)))

    assert "not fused: its activation is Tanh; there are relu" in report_of(hidden_act="tanh")
    report = report_of(intermediate_size=72)
    assert (
        report.endswith("not fused: its mlp.gate_proj is left")
        and report.count("72 outputs: int8 products") == 2
    )
    model = made("llama")
    report = lsq.convert(model, skip="layers.0.mlp.up_proj")
    assert report.fused == ("model.layers.1",)
    assert "skip names it" in str(report)
    loss(model).backward()
    with pytest.raises(ValueError, match="is converted already"):
        lsq.convert(model, skip="layers.0.mlp.up_proj")


def test_in_float_mode_layers_alone_are_fused():
    model = made("llama")
    report = lsq.convert(model, QuantConfig(mode="float"))
    assert len(report.fused) == 2
    assert report.left == {"lm_head": "mode is 'float', in which nothing is rounded"}
    skipping = lsq.convert(made("llama"), QuantConfig(mode="float"), skip="layers.0.mlp")
    assert skipping.fused == ("model.layers.1",)
    with pytest.raises(ValueError, match="has no linear layer to convert"):
        lsq.convert(made("llama"), QuantConfig(mode="float"), fused=False)


def test_memory_is_planned(model):
    twin = copy.deepcopy(model)
    plan_memory(twin, functools.partial(loss, twin))
    assert_twins(model, twin)
    release_memory(twin)


def test_one_word_and_no_words(model):
    model.eval()
    assert model(words(1, 1)).logits.shape == (1, 1, WORDS)
    with torch.no_grad():
        assert model(words(3, 1)).logits.shape == (3, 1, WORDS)


def test_decoding_in_training_mode():
    model = made("llama")
    mine = fused(model, QuantConfig(mode="float"))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(*(one.generate(words(2, 5), **options) for one in (model, mine)))
    with torch.no_grad():
        begun = mine.eval()(words(2, 5), use_cache=True).past_key_values
    mine.train()
    found = mine(words(2, 1), past_key_values=copy.deepcopy(begun)).logits
    expected = model(words(2, 1), past_key_values=begun).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    unfilled = mine(words(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="does not fill it"):
        mine(words(2, 1), past_key_values=unfilled)


def test_threads_that_decode_with_one_model(model):
    loss(model)
    layer = layers_of(model.eval())[0]
    before = dict(layer.named_parameters())
    entered, leave = threading.Event(), threading.Event()

    def decode():
        with layer.rounded.within(layer):
            entered.set()
            leave.wait()

    other = threading.Thread(target=decode)
    with layer.rounded.within(layer):
        other.start()
        entered.wait(0.2)
    leave.set()
    other.join()
    after = dict(layer.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_weights_changed_unseen_are_rounded_again(model):
    loss(model)
    layer = layers_of(model.eval())[0]

    def rounded():
        with torch.no_grad(), layer.rounded.within(layer):
            return layer.self_attn.o_proj.weight.clone(), layer.self_attn.o_proj.weight.data_ptr()

    first, place = rounded()
    assert rounded()[1] == place
    layer.self_attn.o_proj.weight.data.mul_(0.5)
    torch.testing.assert_close(rounded()[0], 0.5 * first, rtol=0.1, atol=1e-3)


@torch.no_grad()
def write(model):
    for parameter in model.parameters():
        parameter.mul_(1.5)


def test_what_another_process_writes_is_used(model):
    model.eval().share_memory()
    before = loss(model).item()
    values = [1.5 * one.detach() for one in model.parameters()]
    process = torch.multiprocessing.get_context("fork").Process(target=write, args=(model,))
    process.start()
    process.join(60)
    assert all(map(torch.equal, model.parameters(), values))
    assert loss(model).item() != before


def test_pruning_inside_a_layer_is_refused(model):
    prune.l1_unstructured(model.model.layers[0].self_attn.q_proj, "weight", 0.5)
    with pytest.raises(
        ValueError, match=r"self_attn\.q_proj\.weight .* is gone: .*pruning.*lsq\.revert\(model\)"
    ):
        loss(model)
    assert loss(lsq.revert(model)).isfinite()


def test_attention_that_is_not_causal_is_not_fused():
    report = lsq.convert(plain("llama", "Model", is_causal=False))
    assert {one.reason for one in report.whole} == {"its attention is not causal"}


def test_evaluation_draws_no_random_numbers(model):
    """So a training goes on the same with evaluations between its steps and without."""
    model.eval()
    ids = BATCH["input_ids"]
    states = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()]
    with torch.no_grad():
        model(**BATCH)
        model.generate(
            input_ids=ids, attention_mask=BATCH["attention_mask"], max_new_tokens=2, do_sample=False
        )
    taken = []
    for _ in range(2):
        model.zero_grad()
        model(**BATCH).loss.backward()
        taken.append(model.model.embed_tokens.weight.grad.clone())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate() and (states[2] == numpy.random.get_state()[1]).all()
    assert torch.equal(*taken)  # the same input has the same gradient
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1 + 2**-20)
    model.zero_grad()
    model(**BATCH).loss.backward()
    moved = (taken[0] - model.model.embed_tokens.weight.grad).norm() / taken[0].norm()
    assert moved > 1e-3, "rounding is random over a training"


@pytest.mark.parametrize("trained", [False, True])
def test_evaluation_with_gradients_computes_the_same(trained):
    """Notebooks leave torch.no_grad() away, and models fill a cache by default."""
    model, ids = fused(made("llama")), BATCH["input_ids"][:1]
    if trained:
        loss(model).backward()
    model.eval()
    found = model(ids)
    assert all(layer.calibrated for layer in model.model.layers)
    with torch.no_grad():
        expected = model(ids)
        following = model(ids[:, :1], past_key_values=expected.past_key_values).logits
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected.logits, rtol=0, atol=0)
    found.logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.any()
    step = model(ids[:, :1], past_key_values=found.past_key_values).logits
    torch.testing.assert_close(step, following, rtol=0, atol=0)
    with pytest.raises(
        RuntimeError,
        match="keys and values .* have no gradient: give the whole sequence to one pass",
    ):
        step.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_clips_follow_weights_in_a_layers_own_pass(model, grad):
    """So nothing that grows is clipped there, and a state dict changes nothing."""

    def own_pass() -> torch.Tensor:
        with torch.set_grad_enabled(grad):
            return model(**BATCH, output_attentions=True).loss

    model.eval()
    before = own_pass()
    with torch.no_grad():
        for layer in layers_of(model):
            layer.self_attn.o_proj.weight.mul_(4)
    after = own_pass()
    assert after != before
    for layer in layers_of(model):
        assert torch.equal(
            layer.self_attn_out_weight_clip, layer.self_attn.o_proj.weight.abs().amax(dim=1)
        )
    model.state_dict()
    assert torch.equal(own_pass(), after)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_has_either_name_of_transformers(model, name):
    """From 5.24 on it is `cache`."""
    llama = model.eval().model
    cache = transformers.DynamicCache(config=model.config)
    x = torch.randn(2, 5, llama.config.hidden_size)
    with torch.no_grad():
        rotation = llama.rotary_emb(x, torch.arange(5)[None])
        whole = llama.layers[0](x, position_embeddings=rotation)
        filled = llama.layers[0](x, position_embeddings=rotation, **{name: cache})
    assert torch.equal(filled, whole) and cache.get_seq_length(0) == 5
