import copy

import pytest
import torch
from torch import nn

import lsq
from lsq.models import checkpoint_layers

transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=130,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=131,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    lsq.convert(model)
    return model


def passed(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    words = torch.arange(3 * 37).view(3, 37) % 131
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("in_folder", (False, True))
def test_gradients_of_a_llama(in_folder, tmp_path):
    loss, wanted = passed(llama())
    model = llama()
    checkpoint_layers(model, tmp_path if in_folder else None)
    found_loss, found = passed(model)
    assert found_loss == loss
    assert list(tmp_path.iterdir()) == []
    for name, gradient in wanted.items():
        if gradient is not None and gradient.numel() > 100:
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < 0.03, name
    every = wanted["model.layers.2.mlp.down_proj.weight"]
    assert not torch.equal(found["model.layers.2.mlp.down_proj.weight"], every)


def test_it_can_be_undone():
    _, wanted = passed(llama())
    model = llama()
    checkpoint_layers(model)
    model.gradient_checkpointing_disable()
    _, found = passed(model)
    assert all(torch.equal(found[name], wanted[name]) for name in found if found[name] is not None)


def test_a_copy_has_files_of_its_own(tmp_path):
    model = llama()
    checkpoint_layers(model, tmp_path)
    passed(model)
    other = copy.deepcopy(model)
    assert passed(other)[0] == passed(model)[0]
    assert other.model.layers[0]._gradient_checkpointing_func.__self__._folder == tmp_path


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="name another folder"):
        checkpoint_layers(llama(), tmp_path / "none")


def test_layers_of_an_encoder_and_a_decoder_share_what_they_are_given():
    def t5() -> nn.Module:
        torch.manual_seed(1)
        config = transformers.T5Config(
            d_model=96,
            d_ff=160,
            d_kv=24,
            num_layers=3,
            num_heads=4,
            vocab_size=131,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        model = transformers.T5ForConditionalGeneration(config).train()
        lsq.convert(model)
        return model

    loss, wanted = passed(t5())
    model = t5()
    checkpoint_layers(model)
    found_loss, found = passed(model)
    assert found_loss == loss
    large = [one for one in wanted if wanted[one] is not None and wanted[one].numel() > 100]
    for name in large:
        assert (found[name] - wanted[name]).norm() < 0.25 * wanted[name].norm(), name


def test_a_model_of_others():
    with pytest.raises(
        ValueError, match=r"Sequential has no layers that transformers.*LayerInputs"
    ):
        checkpoint_layers(nn.Sequential(nn.Linear(3, 3)))
