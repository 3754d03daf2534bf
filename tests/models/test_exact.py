"""Layers that compute something else than their class says, before and after lsq.convert."""

import copy
import functools
import types
import warnings

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from tests.models.zoo import FLOAT, LLAMA, fused, made, right_padded, words

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
bert = pytest.importorskip("transformers.models.bert.modeling_bert")
WIDTH = LLAMA["hidden_size"]
IDS = words(2, 11)


def result(model: nn.Module) -> torch.Tensor:
    output = model(IDS)
    return output.logits if "logits" in output else output.last_hidden_state


class Halved(llama.LlamaMLP):
    def forward(self, x):
        return 0.5 * super().forward(x)


class Shifted(llama.LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) + x


class Parallel(llama.LlamaMLP):
    """With an adapter beside it."""

    def forward(self, x):
        return super().forward(x) + self.outer(torch.relu(self.inner(x)))


class Wrapper(nn.Module):
    """As PEFT wraps modules that are saved beside its adapters: a copy trains."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, *arguments, **options):
        return self.modules_to_save["default"](*arguments, **options)


def change_all(model: nn.Module, path: str, change) -> None:
    """Change all modules whose paths end so."""
    found = [one for name, one in list(model.named_modules()) if name.endswith(path)]
    assert found
    for one in found:
        change(one)


def becomes(kind: type[nn.Module]):
    return lambda module: setattr(module, "__class__", kind)


def sets(name: str, value):
    return lambda module: setattr(module, name, value)


def wrapped(name: str):
    return lambda module: setattr(module, name, Wrapper(getattr(module, name)))


def halves(module: nn.Module) -> None:
    whole = module.forward
    module.forward = lambda *arguments, **options: 0.5 * whole(*arguments, **options)


def attends_to_itself(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, x, *_, **__: (x * 0.5, None), module)


def without_chunks(module: nn.Module) -> None:
    module.feed_forward_chunk = lambda x: x * 0.5


def adapted(module: nn.Module) -> None:
    module.inner, module.outer = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
    module.__class__ = Parallel


def looked_at(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, made: made * 0.5)


def given_less(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


def has_more(module: nn.Module) -> None:
    module.register_parameter("more", nn.Parameter(torch.ones(3)))


HERE = "tests.models.test_exact"


@pytest.mark.parametrize(
    ("name", "path", "change", "reason"),
    [
        ("llama", ".mlp", halves, "its mlp has a forward of its own"),
        ("bert", "attention.self", attends_to_itself, "attention.self has a forward of its own"),
        ("bert", "encoder.layer.1", without_chunks, "it has a feed_forward_chunk of its own"),
        ("llama", ".mlp", becomes(Halved), f"its mlp is a {HERE}.Halved"),
        ("llama", "input_layernorm", becomes(Shifted), f"its input_layernorm is a {HERE}.Shifted"),
        ("llama", ".mlp", adapted, f"its mlp is a {HERE}.Parallel"),
        ("llama", "s.1", wrapped("input_layernorm"), f"its input_layernorm is a {HERE}.Wrapper"),
        ("llama", "s.1", wrapped("self_attn"), f"its self_attn is a {HERE}.Wrapper"),
        ("gpt2", "h.0", wrapped("ln_1"), f"its ln_1 is a {HERE}.Wrapper"),
        ("gpt2", "h.0", wrapped("mlp"), f"its mlp is a {HERE}.Wrapper"),
        ("llama", "s.1", sets("self_attn", nn.Identity()), "its self_attn is a torch.nn.modules."),
        ("gpt2", "mlp.c_fc", looked_at, "its mlp.c_fc has a hook, looked_at"),
        ("t5 encoder", "layer.1.layer_norm", given_less, "layer_norm has a hook, given_less"),
        (
            "llama",
            "q_proj",
            nn.utils.parametrizations.weight_norm,
            "q_proj is a torch.nn.utils.para",
        ),
        ("llama", ".mlp", has_more, "it has a parameter mlp.more, which its class does not use"),
        ("bert", "attention.self", sets("is_causal", True), "its attention is causal"),
    ],
)
def test_a_layer_that_was_changed_before_is_not_fused(name, path, change, reason):
    model = made(name).eval()
    change_all(model, path, change)
    assert reason in str(lsq.convert(model, FLOAT))


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (llama.LlamaMLP, "forward", f"its mlp has a LlamaMLP.forward that {HERE} defines"),
        (llama.LlamaRMSNorm, "forward", "its input_layernorm has a LlamaRMSNorm.forward that"),
        (llama.LlamaDecoderLayer, "forward", "it has a LlamaDecoderLayer.forward that"),
        (llama.LlamaDecoderLayer, "__call__", "it has a LlamaDecoderLayer.__call__ that"),
        (llama, "apply_rotary_pos_emb", f"forward that calls a apply_rotary_pos_emb of {HERE}"),
        (llama, "eager_attention_forward", "that calls a eager_attention_forward of tests"),
    ],
)
def test_a_class_or_a_function_that_was_patched(kind, name, reason, monkeypatch):
    whole = getattr(kind, name)

    @functools.wraps(whole)  # so that it looks like the other
    def patch(*arguments, **options):
        return whole(*arguments, **options)

    monkeypatch.setattr(kind, name, patch)
    assert reason in str(lsq.convert(made("llama"), FLOAT))


def test_attention_of_others(monkeypatch):
    modeling = pytest.importorskip("transformers.modeling_utils")
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]

    def hotter(*arguments, scaling, **options):
        return sdpa(*arguments, scaling=4 * scaling, **options)

    model = made("llama").eval()
    mine = fused(model, FLOAT)
    monkeypatch.setitem(functions._global_mapping, "sdpa", hotter)
    expected = result(model)
    assert "its attention is 'sdpa', a function of tests" in str(
        lsq.convert(copy.deepcopy(model), FLOAT)
    )
    with pytest.warns(UserWarning, match="runs its own code .*, since its attention is 'sdpa'"):
        torch.testing.assert_close(result(mine), expected, rtol=1e-4, atol=1e-5)
    assert "its own code" in repr(mine)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(result(mine), result(model), rtol=1e-4, atol=1e-5)
    assert "its own code" not in repr(mine)


def later(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("name", "path", "change", "reason"),
    [
        ("llama", ".mlp", halves, "its mlp has a forward of its own"),
        later("llama", "down_proj", looked_at, "its mlp.down_proj has a hook, looked_at"),
        later("gpt2", ".attn", given_less, "its attn has a hook"),
        ("llama", "self_attn", sets("is_causal", False), "its attention is not causal"),
        later(
            "llama", "input_layernorm", sets("variance_epsilon", 0.1), "it has different epsilons"
        ),
        ("llama", "self_attn", sets("scaling", 2.0), None),
        ("bert", "LayerNorm", sets("eps", 0.1), None),
        later("bert", "attention.self", sets("scaling", 90.0), None),
        ("mistral", "self_attn", lambda one: setattr(one.config, "sliding_window", None), None),
        later("t5 encoder", "layer_norm", sets("variance_epsilon", 0.1), None),
    ],
)
def test_a_layer_that_was_changed_afterwards(name, path, change, reason):
    """Settings are read in each pass; else the layer runs its own code, and says so once."""
    model = made(name).eval()
    mine, before = fused(model, FLOAT), result(model)
    result(mine)
    for one in (model, mine):
        change_all(one, path, change)
    expected = result(model)
    assert (expected - before).norm() > 0.01 * before.norm()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.testing.assert_close(result(mine), expected, rtol=1e-4, atol=1e-5)
        result(mine)
    said = [str(one.message) for one in seen]
    assert len(said) == (mine.config.num_hidden_layers if reason else 0)
    assert all(reason in one for one in said)


@pytest.mark.parametrize("activation", ["relu6", "gelu_10"])
def test_activations_that_are_clipped_far_out_are_others(activation):
    report = lsq.convert(made("bert", "Model", hidden_act=activation), FLOAT)
    assert "not fused: its activation is" in str(report)


def test_a_class_that_is_patched_afterwards(monkeypatch):
    model = made("bert").eval()
    mine, whole = fused(model, FLOAT), bert.BertIntermediate.forward
    monkeypatch.setattr(bert.BertIntermediate, "forward", lambda self, x: whole(self, x) * 0.5)
    with pytest.warns(
        UserWarning, match="its intermediate has a BertIntermediate.forward that tests"
    ):
        torch.testing.assert_close(result(mine), result(model), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_replaced_afterwards():
    mine = fused(made("llama"))
    mine.model.layers[1].mlp.act_fn = nn.GELU()
    with pytest.raises(
        ValueError, match=r"mlp\.act_fn of this FusedLlama.* was a .*GELU now\. .*fused"
    ):
        mine(**right_padded((11, 6)))
    mine.model.layers[0].mlp.more = nn.Linear(WIDTH, 4)
    with pytest.raises(ValueError, match=r"mlp\.more of this .* was not there when .*Linear now"):
        mine(**right_padded((11, 6)))
    lsq.revert(mine)
    result(mine)


def test_its_own_code_trains():
    """With rounded weights, under hooks; clips get no gradient, and wait for none."""
    mine = fused(made("llama"), QuantConfig(clips="learned"))
    mine(**right_padded((11, 6))).loss.backward()
    seen = []
    mine.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    mine.zero_grad()
    with pytest.warns(UserWarning, match="its mlp has a hook"):
        mine(**right_padded((11, 6))).loss.backward()
    assert seen and mine.model.layers[0].mlp.up_proj.weight.grad.any()
    assert mine.model.layers[0].feed_forward_input_clip.grad is None
    assert mine.model.layers[1].feed_forward_input_clip.grad is not None


@pytest.mark.parametrize(("window", "kind"), [(4, "Llama"), (4, "Mistral"), later(None, "Mistral")])
def test_a_window_that_the_code_reads(window, kind):
    model = made(kind.lower(), sliding_window=window).eval()
    mine = fused(model, FLOAT)
    assert {one.config.window for one in mine.model.layers} == {
        window if kind == "Mistral" else None
    }
    torch.testing.assert_close(result(mine), result(model), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_options_that_attention_reads():
    model = made("llama").eval()
    mine = fused(model, FLOAT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers changes the configuration
        found, expected = (one(IDS, is_causal=False).logits for one in (mine, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_parts_that_layers_share():
    model = made("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    mine = fused(model, FLOAT)
    for one in (model, mine):
        one(**right_padded((11, 6))).loss.backward()
    for first, second in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(second.grad, first.grad, rtol=1e-3, atol=1e-5)
