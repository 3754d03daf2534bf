"""Layers that compute something else than their class says: not fused, or they run their own code
and say so."""

import copy
import functools
import types
import warnings

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from tests.models.architectures.test_llama import MAKERS, SHAPE
from tests.models.checks import FLOAT, WORDS, fused, made, right_padded, transformers, words

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
bert = pytest.importorskip("transformers.models.bert.modeling_bert")
WIDTH = SHAPE["hidden_size"]
BERT = {
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OTHERS = {
    "llama": MAKERS["llama"],
    "mistral": MAKERS["mistral"],
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_layer=2,
            n_embd=64,
            n_inner=80,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ),
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=WORDS,
            num_layers=2,
            d_model=64,
            d_ff=80,
            d_kv=16,
            num_heads=4,
            dropout_rate=0.0,
        )
    ),
}
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
    """As PEFT wraps modules that are saved beside its adapters: a copy trains, the original
    stays."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, *arguments, **options):
        return self.modules_to_save["default"](*arguments, **options)


def each(path: str, change, of: str = "llama"):
    """A maker of models, and what changes the modules that end so in them."""

    def change_all(model: nn.Module) -> None:
        found = [one for name, one in list(model.named_modules()) if name.endswith(path)]
        assert found
        for one in found:
            change(one)

    return of, change_all


def becomes(kind: type[nn.Module]):
    return lambda module: setattr(module, "__class__", kind)


def wrapped(name: str):
    return lambda module: setattr(module, name, Wrapper(getattr(module, name)))


def halves(module: nn.Module) -> None:
    whole = module.forward
    module.forward = lambda *arguments, **options: 0.5 * whole(*arguments, **options)


def adapted(module: nn.Module) -> None:
    module.__class__, module.inner, module.outer = (
        Parallel,
        nn.Linear(WIDTH, 4),
        nn.Linear(4, WIDTH),
    )


def looked_at(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, made: made * 0.5)


def given_less(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


BEFORE = {
    "its mlp has a forward of its own": each(".mlp", halves),
    "its attention.self has a forward of its own": each(
        "attention.self",
        lambda one: setattr(
            one, "forward", types.MethodType(lambda self, x, *_, **__: (x * 0.5, None), one)
        ),
        "bert",
    ),
    "it has a feed_forward_chunk of its own": each(
        "encoder.layer.1", lambda one: setattr(one, "feed_forward_chunk", lambda x: x * 0.5), "bert"
    ),
    "its mlp is a tests.models.test_exact.Halved": each(".mlp", becomes(Halved)),
    "its input_layernorm is a tests.models.test_exact.Shifted": each(
        "input_layernorm", becomes(Shifted)
    ),
    "its mlp is a tests.models.test_exact.Parallel": each(".mlp", adapted),
    "its input_layernorm is a tests.models.test_exact.Wrapper": each(
        "s.1", wrapped("input_layernorm")
    ),
    "its self_attn is a tests.models.test_exact.Wrapper": each("s.1", wrapped("self_attn")),
    "its ln_1 is a tests.models.test_exact.Wrapper": each("h.0", wrapped("ln_1"), "gpt2"),
    "its mlp is a tests.models.test_exact.Wrapper": each("h.0", wrapped("mlp"), "gpt2"),
    "its self_attn is a torch.nn.modules.linear.Identity": each(
        "s.1",
        lambda one: (
            setattr(one, "self_attn", Wrapper(one.self_attn))
            or setattr(one, "self_attn", nn.Identity())
        ),
    ),
    "its mlp.c_fc has a hook, looked_at": each("mlp.c_fc", looked_at, "gpt2"),
    "its layer.1.layer_norm has a hook, given_less": each("layer.1.layer_norm", given_less, "t5"),
    "its self_attn.q_proj is a torch.nn.utils.parametrize.ParametrizedLinear": each(
        "q_proj", lambda one: nn.utils.parametrizations.weight_norm(one)
    ),
    "it has a parameter mlp.more, which its class does not use": each(
        ".mlp", lambda one: one.register_parameter("more", nn.Parameter(torch.ones(3)))
    ),
    "its attention is causal": each(
        "attention.self", lambda one: setattr(one, "is_causal", True), "bert"
    ),
}


@pytest.mark.parametrize("reason", BEFORE)
def test_a_layer_that_was_changed_before_is_not_fused(reason):
    of, change = BEFORE[reason]
    model = made(OTHERS[of]).eval()
    change(model)
    report = lsq.convert(model, FLOAT)
    assert reason in str(report)


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (
            llama.LlamaMLP,
            "forward",
            "its mlp has a LlamaMLP.forward that tests.models.test_exact defines",
        ),
        (llama.LlamaRMSNorm, "forward", "its input_layernorm has a LlamaRMSNorm.forward that"),
        (llama.LlamaDecoderLayer, "forward", "it has a LlamaDecoderLayer.forward that"),
        (llama.LlamaDecoderLayer, "__call__", "it has a LlamaDecoderLayer.__call__ that"),
        (
            llama,
            "apply_rotary_pos_emb",
            "forward that calls a apply_rotary_pos_emb of tests.models.test_exact",
        ),
        (llama, "eager_attention_forward", "that calls a eager_attention_forward of tests"),
    ],
)
def test_a_class_or_a_function_that_was_patched(kind, name, reason, monkeypatch):
    whole = getattr(kind, name)

    @functools.wraps(whole)  # so that it looks like the other
    def patch(*arguments, **options):
        return whole(*arguments, **options)

    monkeypatch.setattr(kind, name, patch)
    assert reason in str(lsq.convert(made(MAKERS["llama"]), FLOAT))


def test_attention_of_others(monkeypatch):
    modeling = pytest.importorskip("transformers.modeling_utils")
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]

    def hotter(*arguments, scaling, **options):
        return sdpa(*arguments, scaling=4 * scaling, **options)

    model = made(MAKERS["llama"]).eval()
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


LATER = pytest.mark.thorough
AFTER = [
    ("its mlp has a forward of its own", each(".mlp", halves)),
    pytest.param(
        "its mlp.down_proj has a hook, looked_at", each("down_proj", looked_at), marks=LATER
    ),
    pytest.param("its attn has a hook", each(".attn", given_less, "gpt2"), marks=LATER),
    (
        "its attention is not causal",
        each("self_attn", lambda one: setattr(one, "is_causal", False)),
    ),
    pytest.param(
        "it has different epsilons",
        each("input_layernorm", lambda one: setattr(one, "variance_epsilon", 0.1)),
        marks=LATER,
    ),
    (None, each("self_attn", lambda one: setattr(one, "scaling", 2.0))),
    (None, each("LayerNorm", lambda one: setattr(one, "eps", 0.1), "bert")),
    pytest.param(
        None, each("attention.self", lambda one: setattr(one, "scaling", 90.0), "bert"), marks=LATER
    ),
    (None, each("self_attn", lambda one: setattr(one.config, "sliding_window", None), "mistral")),
    pytest.param(
        None,
        each("layer_norm", lambda one: setattr(one, "variance_epsilon", 0.1), "t5"),
        marks=LATER,
    ),
]


@pytest.mark.parametrize(("reason", "changed"), AFTER)
def test_a_layer_that_was_changed_afterwards(reason, changed):
    """Settings are read in each pass; else the layer runs its own code, and says so once."""
    of, change = changed
    model = made(OTHERS[of]).eval()
    mine, before = fused(model, FLOAT), result(model)
    result(mine)
    for one in (model, mine):
        change(one)
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
    config = transformers.BertConfig(**BERT | {"hidden_act": activation, "num_hidden_layers": 1})
    assert "not fused: its activation is" in str(lsq.convert(transformers.BertModel(config), FLOAT))


def test_a_class_that_is_patched_afterwards(monkeypatch):
    model = made(OTHERS["bert"]).eval()
    mine, whole = fused(model, FLOAT), bert.BertIntermediate.forward
    monkeypatch.setattr(bert.BertIntermediate, "forward", lambda self, x: whole(self, x) * 0.5)
    with pytest.warns(
        UserWarning, match="its intermediate has a BertIntermediate.forward that tests"
    ):
        torch.testing.assert_close(result(mine), result(model), rtol=1e-4, atol=1e-5)


def test_a_module_that_is_replaced_afterwards():
    mine = fused(made(MAKERS["llama"]))
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
    mine = fused(made(MAKERS["llama"]), QuantConfig(clips="learned"))
    mine(**right_padded((11, 6))).loss.backward()
    seen = []
    mine.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    mine.zero_grad()
    with pytest.warns(UserWarning, match="its mlp has a hook"):
        mine(**right_padded((11, 6))).loss.backward()
    assert seen and mine.model.layers[0].mlp.up_proj.weight.grad.any()
    assert mine.model.layers[0].feed_forward_input_clip.grad is None
    assert mine.model.layers[1].feed_forward_input_clip.grad is not None


@pytest.mark.parametrize(
    ("window", "kind"), [(4, "Llama"), (4, "Mistral"), pytest.param(None, "Mistral", marks=LATER)]
)
def test_a_window_that_the_code_reads(window, kind):
    config = getattr(transformers, kind + "Config")(**SHAPE, sliding_window=window)
    model = made(lambda: getattr(transformers, kind + "ForCausalLM")(config)).eval()
    mine = fused(model, FLOAT)
    assert {one.config.window for one in mine.model.layers} == {
        window if kind == "Mistral" else None
    }
    torch.testing.assert_close(result(mine), result(model), rtol=1e-4, atol=1e-5)


def test_dropout_that_changes_in_training():
    model = made(MAKERS["llama"])
    mine = fused(model, FLOAT)
    before = result(mine)
    for layer in mine.model.layers:
        layer.self_attn.attention_dropout = 0.9
    assert (result(mine) - before).abs().max() > 1e-3


@pytest.mark.thorough
def test_options_that_attention_reads():
    model = made(MAKERS["llama"]).eval()
    mine = fused(model, FLOAT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers changes the configuration
        found, expected = (one(IDS, is_causal=False).logits for one in (mine, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_parts_that_layers_share():
    model = made(MAKERS["llama"])
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    mine = fused(model, FLOAT)
    for one in (model, mine):
        one(**right_padded((11, 6))).loss.backward()
    for first, second in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(second.grad, first.grad, rtol=1e-3, atol=1e-5)
