"""Clips of one format in a model of another: what is kept, and what is measured anew."""

import copy

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.models.clips import clip_names, clip_state, load_clip_state
from lsq.models.other_format import load_other_format


def made(**options) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 64))
    lsq.convert(model, QuantConfig(**options), minimum_width=16)
    model(torch.randn(5, 64)).sum().backward()
    return model


def ours(**options) -> nn.Module:
    torch.manual_seed(3)
    quant = QuantConfig(**options)
    model = nn.Sequential(
        QuantizedLinear(64, 32, quant=quant), QuantizedLinear(32, 64, quant=quant)
    )
    model(torch.randn(5, 64)).sum().backward()
    return model


def test_clips_of_weights_are_measured_anew_and_those_of_activations_stay():
    first, second = made(), made(weight_granularity="tensor")
    state = {**clip_state(first), "2.input_clip": torch.tensor([7.0])}
    expected = copy.deepcopy(second[2])
    expected.calibrate_weights()
    second[2].weight_clip.data.fill_(3.0)
    assert not load_other_format(second, state, clip_names(second)).activations_due
    assert second[2].input_clip.item() == 7.0 and second[2].passes == 1 and second[2].calibrated
    assert torch.equal(second[2].weight_clip, expected.weight_clip)


def test_clips_of_activations_are_measured_in_the_next_pass_where_their_format_changes():
    first, second = made(), made(bits=3)
    assert load_other_format(second, clip_state(first), clip_names(second)).activations_due
    assert not second[0].calibrated and second[0].passes == 1
    second(torch.randn(5, 64))
    assert second[0].calibrated


def test_a_whole_state_comes_with_its_weights():
    first, second = made(), made(bits=3)
    first[0].weight.data.mul_(100.0)
    before = second[0].weight_clip.clone()
    load_other_format(second, first.state_dict(), second.state_dict().keys())
    assert torch.equal(first[0].weight, second[0].weight)
    assert (second[0].weight_clip > 20 * before).all()


def test_clips_by_themselves():
    first, second = made(), made(weight_granularity="tensor")
    with pytest.raises(ValueError, match="weight_granularity='channel', but"):
        load_clip_state(second, clip_state(first))
    load_clip_state(second, clip_state(first), other_format=True)
    assert torch.equal(second[0].input_clip, first[0].input_clip)


def test_what_does_not_fit_is_refused_and_nothing_is_loaded():
    first, second = made(), made(bits=3)
    before = {name: value.clone() for name, value in second.state_dict().items()}
    state = clip_state(first)
    wanted = clip_names(second)
    with pytest.raises(
        ValueError, match=r"1 tensors, first 2\.passes: nothing in the checkpoint, \[\] here"
    ):
        load_other_format(
            second, {name: one for name, one in state.items() if name != "2.passes"}, wanted
        )
    with pytest.raises(
        ValueError, match=r"first 7\.input_clip: \[1\] in the checkpoint, nothing here"
    ):
        load_other_format(second, {**state, "7.input_clip": torch.ones(1)}, wanted)
    third = made(weight_granularity="tensor")
    with pytest.raises(ValueError, match=r"2\.input_clip is nan"):
        load_other_format(third, {**state, "2.input_clip": torch.tensor([float("nan")])}, wanted)
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())


def test_clips_of_earlier_versions_are_of_integers():
    state = {name: one for name, one in clip_state(made()).items() if not name.endswith(".format")}
    second = made(activation_format="fp8-e4m3/tensor", gradient_format="float32")
    assert load_other_format(second, state, clip_names(second)).activations_due
    assert not second[0].calibrated
    int4 = made(weight_format="int4")
    assert not load_other_format(int4, state, state.keys()).activations_due


def test_clips_that_are_fixed_are_not_lost_in_silence():
    """Nothing would measure them for the new format, and what was learned would be gone."""
    first, second = made(), made(bits=3, clip_init="fixed")
    before = {name: value.clone() for name, value in second.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"0\.\w+_clip must be measured .* clip_init is 'fixed'.* --clip-init mse"
    ):
        load_other_format(second, clip_state(first), clip_names(second))
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())
    kept = made(gradient_format="float32", weight_granularity="tensor")
    load_other_format(kept, clip_state(first), clip_names(kept))
    assert kept[0].input_clip.equal(first[0].input_clip)


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
    ],
)
def test_formats_of_every_kind(before, after, later):
    first, second, fresh = ours(**before), ours(**after), ours(**after)
    state = clip_state(first)
    assert load_other_format(second, state, clip_names(second)).activations_due is later
    x = torch.randn(5, 64)
    if not later and before.get("activation_format") == after.get("activation_format"):
        for layer in (0, 1):
            if after.get("activation_format") != "float32":
                assert torch.equal(second[layer].input_clip, first[layer].input_clip)
    for layer in (0, 1):
        if after.get("weight_format") != "float32":
            fresh[layer].calibrate_weights()
            assert torch.equal(second[layer].weight_clip, fresh[layer].weight_clip)
    assert second(x).isfinite().all()
    load_clip_state(ours(**after), clip_state(second))
