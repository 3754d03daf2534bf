"""The clips of a converted model by themselves."""

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import lsq
from lsq.config import QuantConfig
from lsq.models.clip_state import clip_names, clip_state, keep_apart, load_clip_state
from lsq.models.sparsity import sparsify


class Pretrained(nn.Module):
    """Does as the models of transformers do."""

    _keys_to_ignore_on_save = None

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def saved(self) -> set[str]:
        return self.state_dict().keys() - set(self._keys_to_ignore_on_save or ())


def made(**options) -> Pretrained:
    model = Pretrained(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
    lsq.convert(model, QuantConfig(**options), minimum_width=16)
    model.layers(torch.randn(5, 64)).sum().backward()
    return model


def test_names_and_values():
    model = made()
    state = clip_state(model)
    assert state.keys() == clip_names(model)
    names = {"weight_clip", "input_clip", "calibrated", "passes", "float_fallback", "format"}
    assert {name.rpartition(".")[2] for name in state} == names
    model.layers[0].weight_clip.data.fill_(7.0)
    assert not state["layers.0.weight_clip"].eq(7.0).any()


@pytest.mark.parametrize("clips", ["learned", "absmax"])
def test_what_is_saved_goes_on(clips):
    """Clips of weights that do not learn are those of the weights that are there."""
    first, second = made(clips=clips), made(clips=clips)
    weights = {
        name: value.clone()
        for name, value in second.named_parameters()
        if name not in clip_names(second)
    }
    load_clip_state(second, clip_state(first))
    wanted, loaded = clip_state(first), clip_state(second)
    for name, value in wanted.items():
        if clips == "absmax" and name.endswith("weight_clip"):
            value = second.get_parameter(name.removesuffix("_clip")).detach().abs().amax(dim=1)
        assert torch.equal(value, loaded[name]), name
    assert all(torch.equal(second.get_parameter(name), value) for name, value in weights.items())


def test_the_mean_of_clips_is_loaded():
    first, second, third = made(), made(), made()
    states = clip_state(first), clip_state(second)
    load_clip_state(
        third, {name: (value + states[1][name]) / 2 for name, value in states[0].items()}
    )
    for name, clip in third.layers[0].clips().items():
        one, other = (model.layers[0].clips()[name] for model in (first, second))
        torch.testing.assert_close(clip, (one + other) / 2)
    assert third.layers[0].calibrated and third.layers[0].passes == 1


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_models_has_the_mean_of_weights_and_clips(use_buffers):
    """The float model with the mean of the weights is what it is close to."""
    model, x = made(), torch.randn(5, 64)
    averaged = swa_utils.AveragedModel(model, use_buffers=use_buffers)
    seen = []
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.03)
        averaged.update_parameters(model)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    for parameter, *values in zip(averaged.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.stack(values).mean(0))
    clips = {name: value.clone() for name, value in clip_state(averaged.module).items()}
    found = averaged.eval().module.layers(x)
    assert all(
        torch.equal(value, clips[name]) for name, value in clip_state(averaged.module).items()
    )
    expected = lsq.revert(averaged.module).layers(x)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_masks_go_with_the_clips():
    models = made(), made()
    for model in models:
        sparsify(model)
    first, second = models
    state = clip_state(first)
    assert {"layers.0.weight_kept", "layers.2.weight_kept"} < state.keys()
    assert first.saved() == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")
    }
    load_clip_state(second, state)
    assert torch.equal(second.layers[0].weight_kept, first.layers[0].weight_kept)


def test_other_clips_are_refused():
    model, state = made(), clip_state(made())
    kept = clip_state(model)
    with pytest.raises(
        ValueError, match=r"1 of this model are missing, first layers\.0\.weight_clip, and 1 are of"
    ):
        load_clip_state(
            model,
            {name.replace("0.weight_clip", "7.weight_clip"): one for name, one in state.items()},
        )
    with pytest.raises(
        ValueError, match="weight_granularity='tensor', but .* weight_granularity='channel'"
    ):
        load_clip_state(model, clip_state(made(weight_granularity="tensor")))
    with pytest.raises(ValueError, match="not a number|finite|above 0"):
        load_clip_state(model, {**state, "layers.2.input_clip": torch.tensor([float("nan")])})
    assert all(torch.equal(value, clip_state(model)[name]) for name, value in kept.items())


def test_clips_of_earlier_versions_are_integers():
    """Which did not say so."""
    state = {name: one for name, one in clip_state(made()).items() if not name.endswith(".format")}
    load_clip_state(made(), state)
    model = made(weight_format="int8,layers.2.*=nvfp4")
    kept = clip_state(model)
    with pytest.raises(
        ValueError, match=r"layers\.2\.\*\) was trained with weight_format='int8', but .*'nvfp4'"
    ):
        load_clip_state(model, state)
    assert all(torch.equal(value, clip_state(model)[name]) for name, value in kept.items())


def test_checkpoints_of_transformers_leave_clips_out():
    model = made()
    floats = {f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")}
    assert model.saved() == floats
    keep_apart(model, apart=False)
    assert model.saved() == floats | clip_names(model)
    keep_apart(model)
    assert lsq.revert(model).saved() == floats and not model._keys_to_ignore_on_save
    assert not Pretrained._keys_to_ignore_on_save
