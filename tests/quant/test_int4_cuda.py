"""Weights of 4 bits in groups on CUDA: kernels in the emulator, or on a GPU."""

import copy
import math

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.native.compiler import compile_kernels
from lsq.ops.rounding import RoundWeight, UnpackWeight
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from lsq.run.backends import backend
from tests.layers.shapes import config_of
from tests.ops.compare import empty
from tests.ops.cuda import compare_cuda


def compared(values, clip, rows):
    """The weight after both kernels, each of which makes the CPU's bytes."""
    form = WEIGHT_FORMATS["int4"](8, Grain.ROW if len(clip) == len(values) else Grain.TENSOR)
    stored = empty(rows, form.stored_columns(values.shape[1]), dtype=torch.int8)
    operation = RoundWeight(
        weight=Weight(format=form, codes=stored, scale=empty(rows), values=values, clip=clip)
    )
    weight = compare_cuda(operation, exact=True).weight
    codes = empty(rows, values.shape[1], dtype=torch.int8)
    found = compare_cuda(UnpackWeight(weight=weight.bare(), codes=codes), exact=True)
    assert torch.equal(found.codes, form.unpack(weight.codes, values.shape[1]))
    return weight


@pytest.mark.parametrize("columns", [16, 32, 48, 80, 272])
@pytest.mark.parametrize("clips", [1, 33])
def test_kernels_make_the_bytes_of_the_cpu(columns, clips):
    compared(torch.randn(33, columns) * torch.rand(33, 1) * 3, 0.5 + torch.rand(clips), 48)


def test_every_code_under_every_multiplier():
    q = torch.arange(-8, 8.0).repeat(2)
    multipliers = [*range(-15, 0), *range(1, 16)]
    ends = torch.tensor([math.inf, -math.inf]).repeat(16)
    weight = compared(
        torch.stack([*(m * q / 2 for m in multipliers), 0 * q, ends]), torch.tensor([60.0]), 32
    )
    assert weight.codes[:30, 0].tolist() == multipliers


@pytest.mark.parametrize("clips", [1, 41])
def test_nan_poisons_what_shares_its_clip(clips):
    values = torch.randn(41, 48)
    values[3, 2], values[29, 47], values[30, 0] = math.nan, math.nan, math.inf
    assert compared(values, torch.ones(clips), 48).scale.isnan().sum() == (2 if clips > 1 else 41)


def turns():
    """Three turns of each loop where two blocks stride: rows and their groups, padding, and scales
    that NaN poisons."""
    for rows, columns, padded in ((41, 144, 48), (3, 208, 64), (800, 16, 800)):
        values = torch.randn(rows, columns)
        values[-1, 5] = math.nan
        compared(values, torch.ones(1), padded)


def test_sizes_that_no_product_takes_are_refused():
    with pytest.raises(ValueError, match="width of a weight is 40.*multiple of 16"):
        compared(torch.randn(16, 40), torch.ones(1), 16)
    with pytest.raises(ValueError, match="padded number of rows is 33.*multiple of 16"):
        compared(torch.randn(33, 48), torch.ones(1), 33)


@pytest.mark.thorough
@pytest.mark.parametrize("backward", ["int8", "float"])
def test_a_layer_trains_as_on_the_cpu(backward):
    """27 rows, whose products read weights as they are stored, and 81."""
    torch.manual_seed(0)
    config = config_of(weight_format="int4", backward=backward, clip_gradient="lsq")
    layers = [TransformerEncoderLayer(config)]
    layers.append(copy.deepcopy(layers[0]))
    for sentences in (3, 9):
        x, results = torch.randn(9, sentences, config.hidden), []
        for layer, name in zip(layers, ("emulated", "cpu"), strict=True):
            layer.backend = backend(name)
            layer.zero_grad()
            torch.manual_seed(1)
            y = layer(x)
            y.square().sum().backward()
            results.append([y, *(parameter.grad for parameter in layer.parameters())])
        for found, wanted in zip(*results, strict=True):
            assert (found - wanted).norm() <= 0.05 * wanted.norm() + 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_nothing_spills(target):
    assert not any(
        taken.spill_bytes for taken in compile_kernels("int4.cu", (), target).resources.values()
    )
