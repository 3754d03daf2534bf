"""Masks of a module's weights: buffers, copies, dtypes, and who reads what they leave."""

import copy

import pytest
import torch
from torch.optim import swa_utils

from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.layers.weight_masks import WeightMasks, without_masks


@pytest.fixture
def layer() -> QuantizedLinear:
    """Whose mask keeps every second input."""
    torch.manual_seed(1)
    layer = QuantizedLinear(16, 32, quant=QuantConfig(backward="float"))
    layer.weight_masks = WeightMasks(straight_through=False)
    layer.weight_masks.add(layer, "weight")
    layer.weight_masks.put(layer, "weight", torch.arange(16).remainder(2).bool().expand(32, 16))
    return layer


def test_one_bit_a_value(layer):
    assert layer.weight_kept.dtype == torch.float16 and layer.weight_kept.numel() == 16 * 32 / 8
    assert layer.other_names() == ["weight_kept"] and "weight_kept" in layer.state_dict()
    assert layer.weight_masks.mask(layer, "weight").tolist() == [[False, True] * 8] * 32


def test_what_is_read(layer):
    expected = layer.weight.detach().clone()
    expected[:, ::2] = 0
    assert torch.equal(layer.values_of("weight"), expected)
    assert layer.values_of("bias") is layer.bias
    layer.fall_back()
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer.eval()(x), torch.nn.functional.linear(x, expected, layer.bias))
    layer.weight_masks.fill(layer)
    assert layer.values_of("weight") is layer.weight
    assert layer.weight_masks.mask(layer, "weight").all()


def test_a_state_without_masks(layer):
    state = layer.state_dict()
    found = without_masks(state)
    assert state.keys() - found.keys() == {"weight_kept"}
    assert torch.equal(found["weight"], layer.values_of("weight"))
    del state["weight"]
    assert without_masks(state).keys() == state.keys()  # who loads it names what is left over
    state["weight"] = torch.randn(3, 16)
    with pytest.raises(ValueError, match="48 bits take 6 bytes, but packed holds 64"):
        without_masks(state)


def test_a_loaded_mask_counts_at_once(layer):
    other, x = copy.deepcopy(layer), torch.randn(5, 16)
    other.weight_masks.put(other, "weight", torch.ones(32, 16, dtype=torch.bool))
    assert not torch.equal(layer.eval()(x), other.eval()(x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))
    assert layer.weight_masks.mask(layer, "weight").all() and not layer.weight_masks.active


@pytest.mark.parametrize("average", [None, swa_utils.get_ema_multi_avg_fn(0.9)])
def test_an_average_of_models_has_their_mask(layer, average):
    averaged = swa_utils.AveragedModel(layer, multi_avg_fn=average, use_buffers=True)
    for step in range(3):
        with torch.no_grad():
            layer.weight.add_(0.1 * step)
        averaged.update_parameters(layer)
    copy_of = averaged.module
    assert torch.equal(copy_of.weight_kept, layer.weight_kept)
    assert not torch.equal(copy_of.weight, layer.weight)
    expected = copy_of.weight.detach().clone()
    expected[:, ::2] = 0
    assert torch.equal(copy_of.values_of("weight"), expected)


def test_the_mean_of_states(layer):
    state, other = layer.state_dict(), copy.deepcopy(layer)
    other.load_state_dict({name: (3 * value) / 3 for name, value in state.items()})
    assert torch.equal(other.weight_kept, layer.weight_kept) and other.weight_masks.active
    older = state | {"weight_kept": state["weight_kept"].to(torch.uint8)}
    other.load_state_dict(older)
    assert torch.equal(without_masks(older)["weight"], other.values_of("weight"))
    other.weight_masks.put(other, "weight", torch.arange(16).remainder(4).lt(2).expand(32, 16))
    different = {name: (value + other.state_dict()[name]) / 2 for name, value in state.items()}
    with pytest.raises(
        ValueError, match="weight_kept in the checkpoint is no mask of two of four weights"
    ):
        layer.load_state_dict(different)


def test_other_dtypes(layer):
    layer.bfloat16()
    assert layer.values_of("weight").dtype == torch.bfloat16
    assert layer.weight_masks.mask(layer, "weight").tolist() == [[False, True] * 8] * 32
    assert layer(torch.randn(5, 16, dtype=torch.bfloat16)).isfinite().all()


def test_clips_are_those_of_what_is_left(layer):
    with torch.no_grad():
        layer.weight[:, ::2] = 100.0
    layer.calibrate_weights()
    assert (layer.weight_clip < 1).all()
