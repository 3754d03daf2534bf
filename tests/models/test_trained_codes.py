"""Whole models that train as codes: against float weights, tied, fused, reverted, refused."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lsq
from lsq.layers.trained_codes import TrainedCodes
from lsq.models import LsqConfig, float_state_dict
from lsq.optim import Adam


def llama(tied: bool = False, seed: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=tied, **sizes, **heads))


def losses(model, optimizer, steps: int = 12) -> list[float]:
    """Losses of a task that is learned fast: the next word is the last one plus one."""
    chance, found = torch.Generator().manual_seed(7), []
    torch.manual_seed(9)
    model.train()
    for _ in range(steps):
        words = (torch.randint(96, (8, 1), generator=chance) + torch.arange(16)) % 96
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_training_is_as_with_floats(tied):
    found = {}
    for kind in ("floats", "codes"):
        model = llama(tied)
        lsq.convert(model, tied=tied)
        if kind == "codes":
            kept = lsq.train_codes(model)
            assert kept.weights >= 15 and not kept.left
        found[kind] = losses(model, Adam(model.parameters(), lr=3e-3))
    assert found["codes"][-1] < 0.7 * found["codes"][0]
    torch.testing.assert_close(
        torch.tensor(found["codes"]), torch.tensor(found["floats"]), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_may_be_computed_again_in_the_backward_pass(reentrant):
    found = []
    for again in (False, True):
        model = llama()
        lsq.convert(model)
        lsq.train_codes(model)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        optimizer = Adam(model.parameters(), lr=3e-3, moment_bits=8).step_in_backward()
        found.append(losses(model, optimizer, 5))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-3, atol=0)


def test_tied_weights_are_one_parameter():
    model = llama(tied=True)
    lsq.convert(model, tied=True)
    lsq.train_codes(model)
    head, words = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is words and isinstance(head, TrainedCodes)


def test_weights_of_one_product_lie_in_one_tensor():
    model = llama()
    lsq.convert(model)
    lsq.train_codes(model)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert len({id(part.codes) for part in parts}) == 1
    assert [part.first for part in parts] == [0, 64, 96]


def test_revert_gives_the_values_that_trained():
    model = llama()
    lsq.convert(model)
    lsq.train_codes(model)
    losses(model, Adam(model.parameters(), lr=1e-3), 3)
    wanted = {name: one.clone() for name, one in float_state_dict(model).items()}
    lsq.revert(model)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and parameter.requires_grad
        assert torch.equal(parameter, wanted[name])


def test_save_pretrained_writes_floats(tmp_path):
    model = llama()
    lsq.convert(model)
    lsq.train_codes(model)
    losses(model, Adam(model.parameters(), lr=1e-3), 3)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, one in float_state_dict(model).items():
        assert torch.equal(again.state_dict()[name], one), name


def test_accelerate_goes_on_from_its_states(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), llama(tied=True)
    lsq.convert(model, tied=True)
    lsq.train_codes(model)
    optimizer = Adam(model.parameters(), lr=1e-3, moment_bits=8)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses(model, optimizer, 2)
    accelerator.save_state(tmp_path)
    wanted = losses(model, optimizer, 2)
    accelerator.load_state(tmp_path)
    assert losses(model, optimizer, 2) == wanted


def test_a_file_in_bfloat16_is_decoded_shard_by_shard(tmp_path):
    model = llama()
    lsq.convert(model)
    lsq.train_codes(model)
    state = float_state_dict(model, torch.bfloat16)
    assert {one.dtype for one in state.values()} == {torch.bfloat16}
    assert any(isinstance(one, TrainedCodes) for one in state.values())
    model.save_pretrained(tmp_path, state_dict=state, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, one in float_state_dict(model).items():
        assert torch.equal(again.state_dict()[name], one.bfloat16()), name


def test_without_remainder_a_parameter_takes_a_byte():
    model = llama()
    lsq.convert(model)
    floats = sum(one.numel() for one in model.parameters() if one.dim() > 1)
    kept = lsq.train_codes(model, remainder=False)
    assert kept.floats == 4 * floats and floats <= kept.codes < 1.1 * floats
    assert str(kept).startswith("16 trained weights are kept as codes alone")


@pytest.mark.parametrize(
    "quant, reason",
    [
        (lsq.QuantConfig(clips="learned"), "learned clips"),
        (lsq.QuantConfig(weight_format="int4"), "learned clips"),
        (lsq.QuantConfig(weight_format="ternary/row"), "another format than int8"),
    ],
)
def test_what_cannot_be_kept_is_named(quant, reason):
    model = nn.Sequential(nn.Linear(64, 64))
    lsq.convert(model, quant)
    with pytest.raises(ValueError, match=reason):
        lsq.train_codes(model)
    assert type(model[0].weight) is nn.Parameter


def test_a_float_model_is_refused():
    with pytest.raises(ValueError, match="call lsq.convert"):
        lsq.train_codes(nn.Linear(64, 64))


def test_frozen_weights_are_left():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    lsq.convert(model)
    kept = lsq.train_codes(model)
    assert kept.weights == 1 and list(kept.left.values()) == [1]
    assert "not trained; lsq.freeze is for them" in str(kept)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_become_codes_while_transformers_reads_them(tied, tmp_path):
    model = llama(tied)
    model.save_pretrained(tmp_path / "floats", max_shard_size="50KB")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=LsqConfig())
    matrices = [one for one in loaded.parameters() if one.dim() > 1]
    assert all(isinstance(one, TrainedCodes) for one in matrices)
    for name, one in float_state_dict(loaded).items():
        wanted = model.state_dict()[name]
        assert (one - wanted).abs().max() <= 0.51 * wanted.abs().max() / 127 / 254, name
    found = losses(loaded, Adam(loaded.parameters(), lr=3e-3))
    assert found[-1] < 0.8 * found[0]
    loaded.save_pretrained(tmp_path / "trained")
    assert "quant" not in (tmp_path / "trained" / "config.json").read_text()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(again.lm_head.weight, loaded.lm_head.weight.detach().clone())


def test_options_of_a_quantization_config():
    config = LsqConfig(remainder=False, clip_init="absmax")
    again = LsqConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict() and again.quant.clip_init == "absmax"
    with pytest.raises(ValueError, match="LsqConfig has no 'bit'"):
        LsqConfig(bit=8)
    with pytest.raises(ValueError, match="remainder is 1"):
        LsqConfig(remainder=1)


def test_a_device_map_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device_map is .*meta.*leave it out"):
        LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=LsqConfig(), device_map="meta"
        )


def test_other_dtypes_are_refused():
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    lsq.convert(model)
    with pytest.raises(ValueError, match="1 are torch.bfloat16, and not float32"):
        lsq.train_codes(model)


def test_a_configuration_inside_a_model_is_refused(tmp_path):
    model = llama()
    model.config.quantization_config = LsqConfig().to_dict()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="stands in the configuration of a model"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_weight_that_no_file_has_is_new_and_trains(tmp_path):
    model = llama()
    state = model.state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    del state[name]
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=LsqConfig())
    kept = loaded.get_parameter(name)
    assert isinstance(kept, TrainedCodes) and kept.detach().clone().any()
    found = losses(loaded, Adam(loaded.parameters(), lr=3e-3), 4)
    assert found[-1] < found[0]
