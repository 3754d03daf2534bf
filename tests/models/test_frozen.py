"""Frozen weights as codes alone: passes compute what they did, and nothing is written."""

import copy
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

import lsq
from lsq.config import QuantConfig
from lsq.layers.coded_weight import CodedWeight, Codes
from lsq.layers.module import ProgramModule
from lsq.models import float_state_dict, frozen
from lsq.models.exact import base_of
from lsq.models.frozen import SAVED
from lsq.models.fused_layer import FusedLayer
from lsq.observe import observe
from lsq.optim import Adam
from tests import sampling
from tests.models.zoo import adapted, codes_are_kept, made, right_padded

peft = pytest.importorskip("peft")

BATCH = right_padded((11, 6))
INT4 = {"weight_format": "int4"}
both = pytest.mark.parametrize("fused", [True, False])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def converted(**quant) -> torch.nn.Module:
    model = made("llama")
    lsq.convert(model, QuantConfig(**quant))
    return model


def llama(
    *, first: str = "peft", fused: bool = True, dtype=torch.float32, **quant
) -> torch.nn.Module:
    model = made("llama").to(dtype)
    if first == "peft":
        model = adapted(model)
    lsq.convert(model, QuantConfig(**quant), fused=fused)
    return model if first == "peft" else adapted(model)


def frozen_llama(*, measured: bool = True, **options) -> torch.nn.Module:
    model = llama(**options)
    if measured:
        step(model)
    lsq.freeze(model)
    return model


def step(model: torch.nn.Module, batch=BATCH, seed: int = 1) -> dict[str, torch.Tensor]:
    """Gradients of the loss, and the loss among them."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **found}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def assert_same(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """In training, and afterwards in eval mode."""
    for seed in range(2):
        assert same(step(first, seed=seed), step(second, seed=seed))
    assert torch.equal(logits(second), logits(first))


def weight_of(model: torch.nn.Module, name: str = "q_proj") -> torch.nn.Parameter:
    return next(
        one for path, one in model.named_parameters() if path.endswith(f"{name}.base_layer.weight")
    )


def coded(model: torch.nn.Module) -> dict[str, CodedWeight]:
    return {name: one for name, one in model.named_parameters() if isinstance(one, CodedWeight)}


@pytest.mark.parametrize("first", sampling.first(["peft", "convert"], 1))
@both
@pytest.mark.parametrize(
    "quant", sampling.first([INT4, {"clips": "learned"}, {}, {"bits": 4}], 1), ids=str
)
def test_losses_and_gradients_are_the_same(first, fused, quant):
    before, after = (llama(first=first, fused=fused, **quant) for _ in range(2))
    if first == "convert":  # else clips have not been measured
        step(before), step(after)
    report = lsq.freeze(after)
    assert report.weights == (15 if fused else 11) and not report.left
    assert_same(before, after)


@both
@pytest.mark.parametrize(("quant", "share"), [({}, 1.0), (INT4, 17 / 32)], ids=str)
def test_bytes_are_those_of_codes(fused, quant, share):
    model = llama(fused=fused, dtype=torch.bfloat16, **quant)
    step(model)
    report, weights = lsq.freeze(model), coded(model).values()
    storages = [one.untyped_storage() for one in weights]
    size = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    assert len(weights) == report.weights
    assert report.floats == 2 * sum(map(torch.numel, weights))
    assert report.codes == size + 4 * sum(map(len, weights))
    assert size <= share * report.floats / 2 * 1.2  # of 80 inputs, int4 stores 96
    assert len(str(report).splitlines()) == 1
    step(model)
    modules = [one for one in model.modules() if isinstance(one, ProgramModule)]
    assert not any(one.weight_state.kept for one in modules)
    joined = [one.joined.values() for one in modules if isinstance(one, FusedLayer)]
    assert all(one is None for every in joined for one in every)


def test_floats_go_one_by_one(monkeypatch):
    model = llama()
    step(model)
    floats = [
        weakref.ref(one) for path, one in model.named_parameters() if "_proj.base_layer" in path
    ]
    there, original = [], frozen.encoded

    def encoded(*given, **options):
        there.append(sum(one() is not None for one in floats))
        return original(*given, **options)

    monkeypatch.setattr(frozen, "encoded", encoded)
    lsq.freeze(model)
    # queries, keys and values are one, and the head is last
    assert there == [14, 11, 10, 9, 8, 7, 4, 3, 2, 1, 0]
    assert not any(one() is not None for one in floats)


@both
@dtypes
def test_passes_make_no_floats_and_no_codes(fused, dtype, monkeypatch):
    model = frozen_llama(fused=fused, dtype=dtype)

    def refuse(*_, **__):
        raise AssertionError("a weight was decoded")

    monkeypatch.setattr(Codes, "decode", refuse)
    with codes_are_kept(model):
        step(model)
        logits(model)
        with torch.inference_mode():
            model(**BATCH)


@both
@dtypes
def test_generation_reads_what_products_see(fused, dtype):
    models = llama(fused=fused, dtype=dtype), frozen_llama(fused=fused, dtype=dtype)
    step(models[0])
    options = {name: BATCH[name][:1] for name in ("input_ids", "attention_mask")}
    options |= {"max_new_tokens": 5, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    wanted, found = (model.eval().generate(**options).scores for model in models)
    assert len(found) == 5 and all(map(torch.equal, found, wanted))


def test_adapters_learn_as_before():
    found = []
    for model in (llama(), frozen_llama(measured=False)):
        optimizer = Adam([one for one in model.parameters() if one.requires_grad], lr=2e-2)
        found.append([])
        for seed in range(4):
            found[-1].append(step(model, seed=seed)["loss"].item())
            optimizer.step()
    assert found[0] == found[1] and found[0][-1] < found[0][0]


@both
def test_weights_in_out(fused):
    models = [adapted(made("gpt2"), ["c_attn"], fan_in_fan_out=True) for _ in range(2)]
    for model in models:
        lsq.convert(model, fused=fused)
    report = lsq.freeze(models[1])
    # the head is the embedding's
    assert report.weights == 8 and list(report.left.values()) == ([1] if fused else [])
    assert_same(*models)


def test_parameters_are_what_they_were():
    model = llama(dtype=torch.bfloat16)

    def seen() -> tuple:
        parameters = {
            name: (one.shape, one.dtype, one.requires_grad)
            for name, one in model.named_parameters()
        }
        return parameters, str(model), model.num_parameters(), model.state_dict().keys()

    before = seen()
    lsq.freeze(model)
    assert seen() == before
    assert all(isinstance(one, torch.nn.Parameter) for one in model.parameters())
    weight = weight_of(model)
    assert "int8" in repr(weight) and weight.detach().float().abs().max() > 0


@both
def test_what_is_frozen_is_not_trained(fused):
    model = frozen_llama(fused=fused, measured=False)
    weight = weight_of(model)
    for train in (weight.requires_grad_, lambda: setattr(weight, "requires_grad", True)):
        with pytest.raises(RuntimeError, match=r"cannot require a gradient: .*lsq.revert\(model\)"):
            train()
    model.requires_grad_(False)


@both
def test_merging_and_saving_come_after_revert(fused, tmp_path):
    model = frozen_llama(fused=fused)
    seen = {name: one + 0.0 for name, one in coded(model).items()}
    merges = (
        model.merge_and_unload,
        lambda: model.merge_and_unload(safe_merge=True),
        model.merge_adapter,
    )
    for merge in merges:
        with pytest.raises(RuntimeError, match=r"lsq.revert\(model\)"):
            merge()
    with pytest.raises(RuntimeError, match="float_state_dict"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = float_state_dict(model)
    assert same({name: found[name] for name in seen}, seen)
    assert all(type(found[name]) is torch.Tensor for name in seen)
    model.save_pretrained(tmp_path / "adapters")
    saved = peft.PeftModel.from_pretrained(made("llama"), tmp_path / "adapters").state_dict()
    adapters = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    assert adapters and same({name: saved[name] for name in adapters}, adapters)
    wanted = logits(lsq.revert(model))
    assert all(type(one) is torch.nn.Parameter for one in model.parameters())
    assert all(torch.equal(model.get_parameter(name), one) for name, one in seen.items())
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), wanted, rtol=1e-3, atol=1e-4)


@dtypes
def test_a_checkpoint_of_the_whole_model_has_decoded_values(dtype, tmp_path):
    model = made("llama").to(dtype)
    names = model.state_dict().keys()
    lsq.convert(model.requires_grad_(False))
    lsq.freeze(model)
    model.save_pretrained(tmp_path)
    again, information = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert again.state_dict().keys() == names and not any(information.values())
    assert again.dtype == dtype and same(again.state_dict(), float_state_dict(model))


def test_copies_and_other_dtypes(tmp_path):
    model = frozen_llama()
    torch.save(model, tmp_path / "model.pt")
    wanted = logits(model)
    for one in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert isinstance(weight_of(one), CodedWeight) and torch.equal(logits(one), wanted)
    codes = weight_of(model).codes
    model.to(torch.bfloat16)
    assert weight_of(model).dtype == torch.bfloat16 and weight_of(model, "v_proj").codes is codes
    torch.testing.assert_close(logits(model).float(), wanted, rtol=0, atol=0.1)


def test_whoever_looks_on_sees_values():
    models, looked = (llama(), frozen_llama(measured=False)), []
    for model in models:
        monitor = lsq.monitor(model, every=1)
        with observe(model) as found:
            step(model)
        monitor.step()
        looked.append((found, monitor.readings))
    assert looked[0][0].keys() == looked[1][0].keys() and len(looked[1][1]) == 3
    assert all(reading.output > 20 for reading in looked[1][1].values())
    for model in models:
        for module in model.modules():
            if isinstance(module, FusedLayer):
                module.fall_back()
    torch.testing.assert_close(step(models[1])["loss"], step(models[0])["loss"], rtol=1e-2, atol=0)


def test_planned_memory():
    models = llama(), frozen_llama(measured=False)
    for model in models:
        lsq.plan_memory(model, lambda model=model: model(**BATCH).loss, mode="guard")
    assert_same(*models)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: made("llama"), r"call lsq.convert\(model\) first"),
        (converted, "15 are trained"),
        (lambda: converted(mode="float").requires_grad_(False), "14 are read as floats"),
        (lambda: llama(weight_format="nvfp4"), "15 are read as floats"),
        (lambda: converted().requires_grad_(False).to("meta"), "15 are on meta"),
    ],
)
def test_nothing_to_freeze(make, reason):
    with pytest.raises(ValueError, match=reason):
        lsq.freeze(make())


def test_freezing_again_takes_what_is_new():
    model = converted()
    model.model.layers[0].requires_grad_(False)
    report = lsq.freeze(model)
    assert report.weights == 7 and list(report.left.values()) == [8]
    assert "left: 8 trained" in str(report)
    step(model)
    model.requires_grad_(False)
    report = lsq.freeze(model)
    assert report.weights == 8 and report.left == {"codes alone already": 7}
    with pytest.raises(ValueError, match="15 are codes alone already"):
        lsq.freeze(model)
    with torch.inference_mode():
        lsq.revert(model)
    assert all(type(one) is torch.nn.Parameter for one in model.parameters())
    assert all(one.requires_grad_(True).requires_grad for one in model.parameters())


def test_sparse_weights_stay():
    report = lsq.freeze(llama(sparsity="2:4"))
    assert report.weights == 1 and report.left == {"sparse": 14}  # the head is dense


def test_one_of_queries_keys_and_values_that_others_replace_is_named():
    model = frozen_llama(measured=False)
    projection = base_of(next(one for one in model.modules() if hasattr(one, "q_proj")).q_proj)
    floats = projection.weight.detach() + 0.0
    projection._parameters["weight"] = torch.nn.Parameter(floats, requires_grad=False)
    with pytest.raises(ValueError, match="are no longer those that became codes"):
        step(model)


def test_a_head_with_an_adapter_is_left_for_peft_to_save(tmp_path):
    model = peft.get_peft_model(
        converted(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    )
    assert lsq.freeze(model).left == {SAVED: 1}
    model.save_pretrained(tmp_path)
    assert any("lm_head" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
