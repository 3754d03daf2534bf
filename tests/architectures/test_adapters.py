"""LoRA adapters of PEFT in fused layers: the results of PEFT's own code, in either order."""

import contextlib
import copy

import pytest
import torch

import lsq
from lsq.architectures.fused_layer import FusedLayer
from lsq.config import QuantConfig
from tests.architectures.checks import FLOAT, made, right_padded, transformers, without_dropout
from tests.architectures.test_bert import model as bert_model
from tests.architectures.test_llama import MAKERS
from tests.layers.shapes import decibels

peft = pytest.importorskip("peft")

BATCH = right_padded((11, 6))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = [ALL, ["q_proj", "v_proj"], ["v_proj", "down_proj"], ["up_proj"]]


def bert() -> torch.nn.Module:
    return bert_model("BertForMaskedLM")


def adapted(model: torch.nn.Module, targets: list[str], **options) -> torch.nn.Module:
    """`model` with adapters that add something."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": targets, **options}
    torch.manual_seed(5)
    found = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found


def converted(targets: list[str], first: str, quant: QuantConfig | None = None, **options):
    """(with PEFT's own code, fused): the same model with the same adapters."""
    model = made(MAKERS["llama"])
    mine = copy.deepcopy(model)
    expected = adapted(model, targets, **options)
    if first == "peft":
        mine = adapted(mine, targets, **options)
    report = lsq.convert(mine, quant)
    assert len(report.fused) == 2, report
    return expected, mine if first == "peft" else adapted(mine, targets, **options)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of the loss, which is among them."""
    model.zero_grad()
    loss = model(**BATCH).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **found}


@contextlib.contextmanager
def no_own_code(monkeypatch):
    """Within it, a layer that runs its own code fails."""

    def refuse(*_, **__):
        raise AssertionError("a fused layer ran its own code")

    with monkeypatch.context() as patched:
        patched.setattr(FusedLayer, "own_pass", refuse)
        yield


@pytest.mark.parametrize("first", ["peft", "convert"])
@pytest.mark.parametrize("targets", TARGETS)
def test_the_same_as_peft_in_float(targets, first, monkeypatch):
    expected, mine = converted(targets, first, FLOAT)
    wanted = gradients(expected)
    with no_own_code(monkeypatch):
        found = gradients(mine)
    assert found.keys() == wanted.keys() and len(wanted) == 1 + 2 * 2 * len(targets)
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("first", ["peft", "convert"])
def test_near_peft_in_integers(first, bits, monkeypatch):
    expected, mine = converted(ALL, first, QuantConfig(bits=bits))
    wanted = gradients(expected)
    with no_own_code(monkeypatch):
        found = gradients(mine)
    assert found.keys() == wanted.keys() and all("lora_" in name for name in found.keys() - {"loss"})
    assert abs(found["loss"] - wanted["loss"]) < 0.1
    for name, one in wanted.items() if bits == 8 else ():
        assert decibels(one, found[name]) > 15, name


def test_codes_of_frozen_weights_are_made_once(monkeypatch):
    _, mine = converted(ALL, "peft")
    gradients(mine)
    layer = next(one for one in mine.modules() if isinstance(one, FusedLayer))
    before = {name: one.data_ptr() for name, one in layer.codes.kept.items()}
    kept = {name: one.clone() for name, one in layer.codes.kept.items()}
    from lsq.layers import weight_codes

    def refuse(*_):
        raise AssertionError("codes of frozen weights were made again")

    with monkeypatch.context() as patched:
        patched.setattr(weight_codes, "_make", refuse)
        gradients(mine)
    assert {name: one.data_ptr() for name, one in layer.codes.kept.items()} == before
    layer.mlp.down_proj.base_layer.weight.data.mul_(2.0)  # so PEFT merges
    gradients(mine)
    assert not torch.equal(layer.codes.kept["feed_forward.fc2_weight.scale"], kept["feed_forward.fc2_weight.scale"])


def test_adapters_learn(monkeypatch):
    _, mine = converted(ALL, "convert", lora_dropout=0.1)
    optimizer = torch.optim.AdamW([one for one in mine.parameters() if one.requires_grad], lr=2e-2)
    losses = []
    with no_own_code(monkeypatch):
        for _ in range(12):
            losses.append(gradients(mine)["loss"].item())
            optimizer.step()
    assert losses[-1] < losses[0] - 0.3, losses


def test_dropout_is_of_the_adapters_alone():
    _, mine = converted(["q_proj", "v_proj"], "peft", FLOAT, lora_dropout=0.5)
    first, second = (mine(**BATCH).loss for _ in range(2))
    assert first != second
    assert mine.eval()(**BATCH).loss == mine(**BATCH).loss
    without_dropout(mine.train())
    assert mine(**BATCH).loss == mine(**BATCH).loss


def test_adapters_that_are_switched_off_changed_and_merged(monkeypatch):
    expected, mine = converted(ALL, "convert", FLOAT)

    def same() -> None:
        with no_own_code(monkeypatch), torch.no_grad():
            wanted, found = (model(**BATCH).loss for model in (expected, mine))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    with expected.disable_adapter(), mine.disable_adapter():
        same()
    same()
    for model in (expected, mine):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = 0.5
    same()
    for model in (expected, mine):
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
        model.set_adapter("other")
    same()
    for model in (expected, mine):
        model.merge_adapter()
    same()
    for model in (expected, mine):
        model.unmerge_adapter()
    same()


@pytest.mark.parametrize("first", ["peft", "convert"])
@pytest.mark.parametrize("whole", [True, False])
def test_merged_it_saves_an_ordinary_checkpoint(first, whole, tmp_path):
    model = made(MAKERS["llama"])
    names = model.state_dict().keys()
    if first == "peft":
        mine = adapted(model, ALL)
        lsq.convert(mine, fused=whole)
    else:
        lsq.convert(model, fused=whole)
        mine = adapted(model, ALL)
    gradients(mine)
    with torch.no_grad():
        wanted = mine.eval()(**BATCH).logits
    merged = mine.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again, information = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert again.state_dict().keys() == names and not any(information.values()), information
    present = BATCH["attention_mask"].bool()
    with torch.no_grad():
        assert decibels(again.eval()(**BATCH).logits[present], wanted[present]) > 20


def test_revert_leaves_the_adapters():
    expected, mine = converted(ALL, "convert")
    gradients(mine)
    lsq.revert(mine)
    torch.testing.assert_close(mine(**BATCH).loss, expected(**BATCH).loss, rtol=0, atol=0)


def test_generation_after_training():
    """Word by word by the layer's own code, which has the adapters in it."""
    expected, mine = converted(ALL, "peft")
    gradients(mine)
    words = {name: BATCH[name][:1] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    with torch.no_grad():
        found, wanted = (one.eval().generate(**words, **options) for one in (mine, expected))
    assert len(found.scores) == 4
    assert all(decibels(*pair) > 15 for pair in zip(wanted.scores[:2], found.scores[:2], strict=True))


def test_layers_whose_first_projection_has_an_activation():
    """Adapters behind which an activation comes have no program; those of attention have one."""
    report = lsq.convert(adapted(bert(), ["query", "value"]))
    assert len(report.fused) == len(report.whole)
    report = lsq.convert(adapted(bert(), ["query", "intermediate.dense"]))
    assert not report.fused
    assert "intermediate.dense has adapters before an activation" in str(report)


@pytest.mark.parametrize(
    "options, reason", [({"use_dora": True}, "DoraLinearVariant"), ({"lora_bias": True}, "bias")]
)
def test_adapters_that_no_program_has(options, reason):
    model = made(lambda: MAKERS["llama"]())
    report = lsq.convert(adapted(model, ["o_proj"], **options))
    assert not report.fused and reason in str(report), report
