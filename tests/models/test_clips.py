"""The clips of a converted model: in files, optimizers and models of another format."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.models import average_clips, load_clips, save_clips
from lsq.models.clips import (
    clip_names,
    clip_state,
    keep_apart,
    load_clip_state,
    load_other_format,
)
from lsq.models.sparsity import sparsify
from tests.models.models import loss_of, model, tokens


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
    for one in models:
        sparsify(one)
    first, second = models
    state = clip_state(first)
    assert {"layers.0.weight_kept", "layers.2.weight_kept"} < state.keys()
    assert first.saved() == {
        f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")
    }
    load_clip_state(second, state)
    assert torch.equal(second.layers[0].weight_kept, first.layers[0].weight_kept)


def without_formats(state: dict) -> dict:
    """As earlier versions wrote it."""
    return {name: one for name, one in state.items() if not name.endswith(".format")}


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (
            {},
            lambda state: {name.replace("0.weight_c", "7.weight_c"): state[name] for name in state},
            r"in 2 tensors, first layers\.0\.weight_clip: nothing in the checkpoint, \[32\]",
        ),
        (
            {},
            lambda state: {**state, "layers.2.input_clip": torch.tensor([float("nan")])},
            "not a number|finite|above 0",
        ),
        (
            {"weight_granularity": "tensor"},
            lambda state: state,
            "weight_granularity='channel', but .* weight_granularity='tensor'",
        ),
        (
            {"weight_format": "int8,layers.2.*=nvfp4"},
            without_formats,
            r"layers\.2\.\*\) was trained with weight_format='int8', but .*'nvfp4'",
        ),
    ],
)
def test_other_clips_are_refused(options, change, message):
    model, state = made(**options), change(clip_state(made()))
    kept = clip_state(model)
    with pytest.raises(ValueError, match=message):
        load_clip_state(model, state)
    assert all(torch.equal(value, clip_state(model)[name]) for name, value in kept.items())


def test_clips_of_earlier_versions_are_integers():
    """Which did not say so."""
    load_clip_state(made(), without_formats(clip_state(made())))


def test_checkpoints_of_transformers_leave_clips_out():
    model = made()
    floats = {f"layers.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")}
    assert model.saved() == floats
    keep_apart(model, apart=False)
    assert model.saved() == floats | clip_names(model)
    keep_apart(model)
    assert lsq.revert(model).saved() == floats and not model._keys_to_ignore_on_save
    assert not Pretrained._keys_to_ignore_on_save


@pytest.mark.parametrize(
    ("clips", "before", "warnings"),
    [("learned", True, 1), ("learned", False, 0), ("absmax", True, 0)],
)
def test_an_optimizer_that_was_made_before(clips, before, warnings, caplog):
    """Without clips that learn nothing is lost: the weights are the parameters that they were."""
    converted = model()
    other = torch.optim.SGD(model().parameters(), lr=0.1)
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.01) if before else None
    with caplog.at_level(logging.WARNING):
        lsq.convert(converted, QuantConfig(clips=clips))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings and other.param_groups
    assert all("made before lsq.convert, so that clips do not learn" in text for text in said)
    if before:
        weight = converted.blocks[0].up.weight.detach().clone()
        loss_of(converted(tokens())).backward()
        optimizer.step()
        assert not torch.equal(weight, converted.blocks[0].up.weight)


def trained(seed: int = 1) -> nn.Module:
    made = model(seed)
    lsq.convert(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(3):
        loss_of(made(tokens(step))).backward()
        optimizer.step()
    return made


def test_clips_go_on_where_they_were(tmp_path):
    first = trained()
    assert save_clips(first, tmp_path / "new") == tmp_path / "new" / "lsq.safetensors"
    second = model(5)
    second.load_state_dict(lsq.models.float_state_dict(first))
    lsq.convert(second)
    load_clips(second, tmp_path / "new")
    for (name, one), other in zip(
        first.state_dict().items(), second.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    torch.manual_seed(3)
    expected = first(tokens(7))
    torch.manual_seed(3)
    assert torch.equal(second(tokens(7)), expected)


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="so there are no clips; call lsq.convert"):
        save_clips(model(1), tmp_path)
    converted = trained()
    missing = r"lsq\.safetensors is not there: .*"
    for folder, hint in (
        (tmp_path, missing + r"save_clips.* writes it.* next pass"),
        (tmp_path / "new", "new is no folder on this machine"),
    ):
        with pytest.raises(FileNotFoundError, match=hint):
            load_clips(converted, folder)
    path = save_clips(converted, tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(FileNotFoundError, match="give the folder that it is in"):
        load_clips(converted, path)
    message = r"lsq\.safetensors: no layer of this Model is .* call lsq\.convert\(model\)"
    with pytest.raises(ValueError, match=message):
        load_clips(model(1), tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"lsq\.safetensors: "):
        load_clips(converted, tmp_path)


def test_one_process_is_told():
    made = nn.Sequential(nn.Linear(64, 64))
    lsq.convert(made)
    with pytest.raises(ValueError, match="there is one process; average_clips is for several"):
        average_clips(made)


# Another format


def ours(**options) -> nn.Module:
    torch.manual_seed(3)
    quant = QuantConfig(**options)
    model = nn.Sequential(
        QuantizedLinear(64, 32, quant=quant), QuantizedLinear(32, 64, quant=quant)
    )
    model(torch.randn(5, 64)).sum().backward()
    return model


def test_a_whole_state_comes_with_its_weights():
    first, second = made(), made(bits=3)
    first.layers[0].weight.data.mul_(100.0)
    before = second.layers[0].weight_clip.clone()
    load_other_format(second, first.state_dict(), second.state_dict().keys())
    assert torch.equal(first.layers[0].weight, second.layers[0].weight)
    assert (second.layers[0].weight_clip > 20 * before).all()


def test_what_does_not_fit_is_refused_and_nothing_is_loaded():
    first, second = made(), made(bits=3)
    before = {name: value.clone() for name, value in second.state_dict().items()}
    state = clip_state(first)
    wanted = clip_names(second)
    with pytest.raises(
        ValueError,
        match=r"1 tensors, first layers\.2\.passes: nothing in the checkpoint, \[\] here",
    ):
        load_other_format(
            second, {name: one for name, one in state.items() if name != "layers.2.passes"}, wanted
        )
    with pytest.raises(
        ValueError, match=r"first layers\.7\.input_clip: \[1\] in the checkpoint, nothing here"
    ):
        load_other_format(second, {**state, "layers.7.input_clip": torch.ones(1)}, wanted)
    third = made(weight_granularity="tensor")
    with pytest.raises(ValueError, match=r"layers\.2\.input_clip is nan"):
        load_other_format(
            third, {**state, "layers.2.input_clip": torch.tensor([float("nan")])}, wanted
        )
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())


def test_clips_of_earlier_versions_are_of_integers():
    state = without_formats(clip_state(made()))
    second = made(activation_format="fp8-e4m3/tensor", gradient_format="float32")
    assert load_other_format(second, state, clip_names(second)).activations_due
    assert not second.layers[0].calibrated
    int4 = made(weight_format="int4")
    assert not load_other_format(int4, state, state.keys()).activations_due


def test_clips_that_are_fixed_are_not_lost_in_silence():
    """Nothing would measure them for the new format, and what was learned would be gone."""
    first, second = made(), made(bits=3, clip_init="fixed")
    before = {name: value.clone() for name, value in second.state_dict().items()}
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.\w+_clip must be measured .* clip_init is 'fixed'.* --clip-init mse",
    ):
        load_other_format(second, clip_state(first), clip_names(second))
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    kept = made(gradient_format="float32", weight_granularity="tensor")
    load_other_format(kept, clip_state(first), clip_names(kept))
    assert kept.layers[0].input_clip.equal(first.layers[0].input_clip)


@pytest.mark.parametrize(
    ("before", "after", "later"),
    [
        ({}, {"weight_format": "nvfp4"}, False),
        ({"weight_format": "vsquant4"}, {"weight_format": "int4"}, False),
        ({}, {"weight_format": "fp8-e4m3/row", "activation_format": "fp8-e4m3/tensor"}, True),
        ({}, {"weight_format": "float32"}, False),
        ({"weight_format": "float32"}, {}, False),
        ({}, {"activation_format": "float32"}, False),
        ({"activation_format": "float32"}, {}, True),
        ({}, {"weight_granularity": "tensor"}, False),
        ({}, {"bits": 3}, True),
    ],
)
def test_formats_of_every_kind(before, after, later):
    first, second, third, fresh = ours(**before), *(ours(**after) for _ in range(3))
    state = clip_state(first)
    assert load_other_format(second, state, clip_names(second)).activations_due is later
    assert all(layer.calibrated is not later and layer.passes == 1 for layer in second)
    load_clip_state(third, state, other_format=True)
    assert all(map(torch.equal, clip_state(third).values(), clip_state(second).values()))
    x = torch.randn(5, 64)
    if not later and before.get("activation_format") == after.get("activation_format"):
        for layer in (0, 1):
            if after.get("activation_format") != "float32":
                assert torch.equal(second[layer].input_clip, first[layer].input_clip)
    for layer in (0, 1):
        if after.get("weight_format") != "float32":
            fresh[layer].calibrate_weights()
            assert torch.equal(second[layer].weight_clip, fresh[layer].weight_clip)
    assert second(x).isfinite().all() and all(layer.calibrated for layer in second)
    load_clip_state(ours(**after), clip_state(second))
