"""LoRA adapters of PEFT in fused layers: the results of PEFT's own code, in either order."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.models.exact import is_lora
from lsq.models.fused_layer import FusedLayer
from tests.layers.shapes import decibels
from tests.models.test_pytorch import encoder, sentences
from tests.models.zoo import (
    FLOAT,
    LINEARS,
    adapted,
    assert_same_gradients,
    codes_are_kept,
    images,
    made,
    right_padded,
    without_dropout,
)
from tests.sampling import in_turn

peft = pytest.importorskip("peft")
hotswap = pytest.importorskip("peft.utils.hotswap")

BATCH = right_padded((11, 6))
EVERY = "all-linear"
"""What PEFT takes for the names of all linear layers but the last one."""


class Encoder(nn.Module):
    """PyTorch's layers in a model that computes a loss."""

    def __init__(self):
        super().__init__()
        self.layers = encoder()

    def forward(self, src: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layers(src).square().mean())


BATCHES = {"vit": images(5), "pytorch": {"src": sentences()}}
"""Others than BATCH."""


def plain(name: str) -> nn.Module:
    return Encoder() if name == "pytorch" else made(name)


CASES = [
    ("llama", LINEARS),
    ("llama", ["q_proj", "v_proj"]),
    ("llama", ["v_proj", "down_proj"]),
    ("llama", ["up_proj"]),
    ("llama", ["gate_proj"]),
    ("bert", EVERY),
    ("bert", ["query", "intermediate.dense"]),
    ("bert", ["output.dense"]),
    ("gpt2", EVERY),
    ("gpt2", ["c_attn"]),
    ("gpt2 relu", EVERY),
    ("vit", EVERY),
    ("marian", EVERY),
    ("marian", ["fc1"]),
    ("t5", EVERY),
    ("t5 v1.1", EVERY),
    ("pytorch", ["linear1", "linear2"]),
]
IN_INTEGERS = [
    ("llama", LINEARS, {}),
    ("llama", LINEARS, {"bits": 4}),
    ("llama", LINEARS, {"clips": "learned"}),
    ("bert", EVERY, {}),
    ("bert", EVERY, {"backward": "float"}),
    ("bert", EVERY, {"clips": "learned"}),
    ("bert", EVERY, {"activation_format": "int8/row"}),
    ("gpt2", EVERY, {}),
    ("gpt2 relu", EVERY, {}),
    ("vit", EVERY, {}),
    ("marian", EVERY, {}),
    ("t5", EVERY, {}),
    ("pytorch", ["linear1", "linear2"], {}),
]


def converted(
    targets, first: str, quant: QuantConfig | None = None, name: str = "llama", **options
):
    """(with PEFT's own code, fused): the same model with the same adapters."""
    model = plain(name)
    mine = copy.deepcopy(model)
    expected = adapted(model, targets, **options)
    if first == "peft":
        mine = adapted(mine, targets, **options)
    report = lsq.convert(mine, quant)
    assert len(report.fused) == len(report.whole) >= 2, report
    return expected, mine if first == "peft" else adapted(mine, targets, **options)


def add(models, targets, active=("default", "other"), **options) -> None:
    """Give models another adapter, and make these active."""
    options = {"r": 2, "target_modules": targets, **options}
    for model in models:
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(**options))
        model.base_model.set_adapter(list(active))


def gradients(model: nn.Module, name: str = "llama") -> dict[str, torch.Tensor]:
    """Of the loss, which is among them."""
    model.zero_grad()
    loss = model(**BATCHES.get(name, BATCH)).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **found}


def loss_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCH).loss


def assert_same(mine: nn.Module, expected: nn.Module, name: str = "llama") -> dict:
    wanted, found = gradients(expected, name), gradients(mine, name)
    assert_same_gradients(found, wanted, atol=1e-6)
    return wanted


@pytest.fixture
def own_code(monkeypatch):
    """A context within which a layer that runs its own code fails."""

    @contextlib.contextmanager
    def refused():
        def refuse(*_, **__):
            raise AssertionError("a fused layer ran its own code")

        with monkeypatch.context() as patched:
            patched.setattr(FusedLayer, "own_pass", refuse)
            yield

    return refused


@pytest.mark.parametrize("case, first", in_turn(CASES, ("peft", "convert"), 1))
def test_the_same_as_peft_in_float(case, first, own_code):
    name, targets = case
    expected, mine = converted(targets, first, FLOAT, name)
    with own_code():
        wanted = assert_same(mine, expected, name)
    assert len(wanted) > 4 and all("lora_" in one for one in wanted.keys() - {"loss"})


@pytest.mark.parametrize("case, first", in_turn(IN_INTEGERS, ("convert", "peft"), 1))
def test_near_peft_in_integers(case, first, own_code):
    name, targets, options = case
    expected, mine = converted(targets, first, QuantConfig(**options), name)
    wanted = gradients(expected, name)
    with own_code():
        found = gradients(mine, name)
    clips = {one for one in found if one.endswith("_clip")}
    assert found.keys() - clips == wanted.keys()
    assert abs(found["loss"] - wanted["loss"]) < 0.1
    least = 12 if name == "t5" else 15  # its ReLUs are near 0
    for parameter, one in wanted.items() if "bits" not in options else ():
        assert decibels(one, found[parameter]) > least, parameter


def test_codes_of_frozen_weights_are_made_once():
    _, mine = converted(LINEARS, "peft")
    gradients(mine)
    layer = next(one for one in mine.modules() if isinstance(one, FusedLayer))
    kept = layer.weight_state.kept
    before = {name: one.data_ptr() for name, one in kept.items()}
    scale = kept["feed_forward.fc2_weight.scale"].clone()
    with codes_are_kept(mine):
        gradients(mine)
    assert {name: one.data_ptr() for name, one in layer.weight_state.kept.items()} == before
    layer.mlp.down_proj.base_layer.weight.data.mul_(2.0)  # so PEFT merges
    gradients(mine)
    assert not torch.equal(layer.weight_state.kept["feed_forward.fc2_weight.scale"], scale)


def test_adapters_learn(own_code):
    _, mine = converted(LINEARS, "convert", lora_dropout=0.1)
    optimizer = torch.optim.AdamW([one for one in mine.parameters() if one.requires_grad], lr=2e-2)
    losses = []
    with own_code():
        for _ in range(12):
            losses.append(gradients(mine)["loss"].item())
            optimizer.step()
    assert losses[-1] < losses[0] - 0.3, losses


def test_dropout_is_of_the_adapters_alone():
    _, mine = converted(["q_proj", "v_proj"], "peft", FLOAT, lora_dropout=0.5)
    assert loss_of(mine) != loss_of(mine)
    assert loss_of(mine.eval()) == loss_of(mine)
    without_dropout(mine.train())
    assert loss_of(mine) == loss_of(mine)


@pytest.mark.parametrize(
    "name, targets, others",
    [
        ("llama", LINEARS, ["o_proj"]),
        ("bert", EVERY, ["intermediate.dense"]),
        ("gpt2", EVERY, ["c_fc"]),
    ],
)
def test_adapters_that_are_switched_off_changed_and_merged(name, targets, others, own_code):
    expected, mine = both = converted(targets, "convert", FLOAT, name)

    def same() -> None:
        with own_code():
            torch.testing.assert_close(loss_of(mine), loss_of(expected), rtol=1e-5, atol=1e-5)

    with expected.disable_adapter(), mine.disable_adapter():
        same()
    same()
    for model in both:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = 0.5
    same()
    add(both, others, active=["other"], init_lora_weights=False)
    same()
    for model in both:
        model.base_model.set_adapter(["default", "other"])
    same()
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in both:
            getattr(model, change)()
        same()


@pytest.mark.parametrize("first", ["peft", "convert"])
@pytest.mark.parametrize(
    "name, targets, whole",
    [
        ("llama", LINEARS, True),
        ("llama", LINEARS, False),
        ("gpt2", EVERY, True),
        ("bert", EVERY, True),
    ],
)
def test_merged_it_saves_an_ordinary_checkpoint(name, targets, first, whole, tmp_path):
    model = plain(name)
    names, kind, present = model.state_dict().keys(), type(model), BATCH["attention_mask"].bool()
    if first == "peft":
        mine = adapted(model, targets)
        lsq.convert(mine, fused=whole)
    else:
        lsq.convert(model, fused=whole)
        mine = adapted(model, targets)
    gradients(mine)
    with torch.no_grad():
        wanted = mine.eval()(**BATCH).logits
        mine.merge_and_unload().save_pretrained(tmp_path)
        again, information = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert again.state_dict().keys() == names and not any(information.values()), information
        assert decibels(again.eval()(**BATCH).logits[present], wanted[present]) > 20


@pytest.mark.parametrize("name, targets", [("llama", LINEARS), ("gpt2", EVERY), ("bert", EVERY)])
def test_revert_leaves_the_adapters(name, targets):
    expected, mine = converted(targets, "convert", name=name)
    gradients(mine)
    lsq.revert(mine)
    torch.testing.assert_close(loss_of(mine), loss_of(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name, targets", [("llama", LINEARS), ("gpt2", EVERY)])
def test_generation_after_training(name, targets):
    """Word by word by the layer's own code, which has the adapters in it."""
    expected, mine = converted(targets, "peft", name=name)
    gradients(mine)
    options = {name: BATCH[name][:1] for name in ("input_ids", "attention_mask")}
    options |= {"max_new_tokens": 4, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        found, wanted = (one.eval().generate(**options).scores for one in (mine, expected))
    assert len(found) == 4
    assert all(decibels(*pair) > 15 for pair in zip(wanted[:2], found[:2], strict=True))


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_several_adapters_at_once(name, own_code):
    expected, mine = both = converted(EVERY, "convert", FLOAT, name)
    add(both, EVERY, lora_alpha=3, init_lora_weights=False)
    with own_code():
        wanted = assert_same(mine, expected)
    assert any("lora_A.other" in one for one in wanted)


def test_adapters_at_once_that_have_different_dropouts():
    _, mine = converted(["v_proj"], "convert", FLOAT)
    add([mine], ["v_proj", "q_proj"], lora_dropout=0.5)
    message = r"self_attn.q_proj, self_attn.v_proj have different dropouts: \[0.0, 0.5\]"
    with pytest.warns(UserWarning, match=message):
        mine(**BATCH)


def test_an_adapter_for_each_sentence_is_of_the_layers_own_code():
    """PEFT says by hooks which sentence has which, for one pass."""
    expected, mine = converted(LINEARS, "convert", FLOAT)
    present, names = BATCH["attention_mask"].bool(), ["default", "__base__"]
    with torch.no_grad():
        wanted = expected.eval()(**BATCH, adapter_names=names).logits[present]
        with pytest.warns(UserWarning, match="its adapter has a hook"):
            found = mine.eval()(**BATCH, adapter_names=names).logits[present]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name, target", [("llama", "o_proj"), ("gpt2", "c_fc"), ("bert", "intermediate.dense")]
)
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"use_dora": True}, "DoraLinearVariant"),
        ({"lora_bias": True}, "its adapter has a bias"),
        ({"lora_dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_adapters_that_no_program_has(name, target, options, reason):
    report = lsq.convert(adapted(plain(name), [target], **options))
    assert not report.fused and all(reason in one.reason for one in report.whole), report


class Tripled(nn.Linear):
    """A class of somebody else's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def doubled(module: nn.Module) -> None:
    ours = module.forward
    module.forward = lambda *given, **options: 2 * ours(*given, **options)


CHANGES = {
    "forward": doubled,
    "forward of A": lambda one: doubled(one.lora_A["default"]),
    "class of A": lambda one: setattr(one.lora_A["default"], "__class__", Tripled),
    "hook of B": lambda one: one.lora_B["default"].register_forward_hook(lambda _, given, y: 2 * y),
    "backward hook": lambda one: one.lora_B["default"].register_full_backward_hook(
        lambda _, dx, dy: (2 * dx[0],)
    ),
    "bias of B": lambda one: setattr(
        one.lora_B["default"], "bias", nn.Parameter(torch.ones(one.out_features))
    ),
    "another dropout": lambda one: one.lora_dropout.update({"default": nn.Tanh()}),
    "mode of dropout": lambda one: one.lora_dropout["default"].eval(),
}
ignored = pytest.mark.filterwarnings("ignore:.*runs its own code:UserWarning")


@pytest.mark.parametrize("what", CHANGES)
@ignored
def test_what_others_do_to_pefts_modules_is_seen_in_the_next_pass(what):
    dropout = 0.5 if "dropout" in what else 0.0
    expected, mine = converted(LINEARS, "peft", FLOAT, lora_dropout=dropout)
    gradients(mine)
    for model in (expected, mine):
        for module in model.modules():
            if is_lora(module):
                CHANGES[what](module)
    assert_same(mine, expected)


@ignored
def test_adapters_that_are_switched_off_while_they_are_merged():
    """PEFT takes them out of the weights in the next pass."""
    expected, mine = converted(LINEARS, "peft", FLOAT)
    gradients(mine)
    for model in (expected, mine):
        model.merge_adapter()
    with expected.disable_adapter(), mine.disable_adapter():
        torch.testing.assert_close(loss_of(mine), loss_of(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss_of(mine), loss_of(expected), rtol=1e-5, atol=1e-5)


def test_adapters_that_no_program_has_leave_a_fused_layer_as_it_was():
    """The passes behind the first one as well."""
    expected, mine = both = converted(["q_proj"], "convert", FLOAT)
    gradients(mine)
    add(both, ["o_proj"], use_dora=True)
    with pytest.warns(UserWarning, match="runs its own code"):
        gradients(mine)
    assert any("other" in name for name in assert_same(mine, expected))


@pytest.mark.thorough
def test_ranks_that_peft_pads():
    expected, mine = converted(LINEARS, "convert", FLOAT)
    gradients(mine)
    hotswap.prepare_model_for_compiled_hotswap(mine, target_rank=8)
    torch.testing.assert_close(loss_of(mine), loss_of(expected), rtol=1e-5, atol=1e-5)
